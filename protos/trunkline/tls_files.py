"""Certificates and keys in PEM files, checked before they are used: gRPC itself reports a bad file only as a connection
that fails.
"""

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

READ_TRIES = 3  # a rotation may replace the files between two reads


class TlsFileError(ValueError):
    """A file of certificates or keys cannot be used. The message is one line that names the file, without its
    content."""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A certificate chain, leaf first, and the private key of its leaf, both in PEM."""

    chain: bytes
    key: bytes


def read_pair(cert_file: str, key_file: str) -> KeyPair:
    """A certificate chain and its key, which belong together. Raises TlsFileError."""
    pair = _read_pair(cert_file, key_file)
    for _ in range(READ_TRIES):
        problem = pair_problem(_server_context(), cert_file, key_file)
        checked, pair = pair, _read_pair(cert_file, key_file)
        if pair != checked:
            continue  # replaced meanwhile: what was checked may be neither of both
        if problem:
            raise TlsFileError(problem)
        return pair
    raise TlsFileError(f"{cert_file} and {key_file} are being replaced")


def load_pair(context: ssl.SSLContext, cert_file: str, key_file: str) -> None:
    """Loads a certificate chain and its key into a context. Raises TlsFileError."""
    if problem := pair_problem(context, cert_file, key_file):
        raise TlsFileError(problem)


def pair_problem(context: ssl.SSLContext, cert_file: str, key_file: str) -> str:
    """Loads a certificate chain and its key into a context. Returns why that failed; empty if it did not."""
    problem = _problem(lambda: context.load_cert_chain(cert_file, key_file, password=_no_password))
    return f"{cert_file} and {key_file} are not a certificate and its key: {problem}" if problem else ""


def read_authorities(ca_file: str) -> bytes:
    """The certificates of a file of trusted authorities, in PEM. Raises TlsFileError."""
    data = _read(ca_file)
    problem = _problem(lambda: _server_context().load_verify_locations(cadata=data.decode("ascii")))
    if problem:
        raise TlsFileError(f"{ca_file} has no certificates of authorities: {problem}")
    return data


def _server_context() -> ssl.SSLContext:
    return ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)


def _read_pair(cert_file: str, key_file: str) -> KeyPair:
    return KeyPair(_read(cert_file), _read(key_file))


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise TlsFileError(f"{path}: {error.strerror}") from None


def _problem(load: Callable[[], None]) -> str:
    """Why OpenSSL cannot load the files; "" if it can."""
    try:
        load()
    except ssl.SSLError as error:
        return (error.reason or "not PEM").replace("_", " ").lower()
    except (OSError, ValueError) as error:  # ValueError: not ASCII, or _no_password
        return error.strerror or type(error).__name__ if isinstance(error, OSError) else str(error)
    return ""


def _no_password() -> str:
    raise ValueError("the key is encrypted")  # otherwise OpenSSL would ask on the terminal
