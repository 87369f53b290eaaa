"""A server's certificate, loaded again when its files are replaced. Connections that exist are not affected.

The files are checked before each handshake, by their inodes and times: a mounted Kubernetes Secret is replaced by one
rename of a symbolic link, other tools write the files one after the other. Files that cannot be used, such as half of
a new pair, leave the last ones in use.
"""

import contextlib
import os
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import grpc
from cryptography import x509

from trunkline.tls_files import KeyPair, TlsFileError, load_pair, read_authorities, read_pair
from trunkline_runtime.log import get_logger


class Validity(NamedTuple):
    """When a certificate is valid, in Unix time."""

    from_unix_s: float
    until_unix_s: float

    @property
    def life_s(self) -> float:
        """The whole life of the certificate."""
        return self.until_unix_s - self.from_unix_s


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The files of a server, in PEM.

    client_ca: authorities of clients' certificates; if it is set, every client must present one (mTLS)
    """

    cert: str
    key: str
    client_ca: str = ""

    def load(self) -> "Loaded":
        """Raises TlsFileError if a file cannot be used."""
        pair = read_pair(self.cert, self.key)
        authorities = read_authorities(self.client_ca) if self.client_ca else b""
        return Loaded(
            pair,
            authorities,
            validity=first_to_expire(pair.chain, self.cert),
            authorities_validity=first_to_expire(authorities, self.client_ca) if authorities else None,
        )

    def stamps(self) -> tuple[object, ...]:
        """Changes when a file is replaced."""
        return tuple(stamp_of(path) for path in (self.cert, self.key, self.client_ca) if path)


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the files held when they were loaded. The validities are those of the first certificate of each file to
    expire; None without client_ca."""

    pair: KeyPair
    authorities: bytes
    validity: Validity
    authorities_validity: Validity | None


class ServerTls:
    """The certificate of a server, for gRPC and for ssl. Raises TlsFileError at the start if a file cannot be used."""

    def __init__(self, files: TlsFiles, now_unix_s: Callable[[], float] = time.time) -> None:
        self._files = files
        self._now_unix_s = now_unix_s
        self._lock = threading.Lock()  # gRPC asks from threads of its own
        self._stamps = files.stamps()  # before loading: a file that is replaced meanwhile is loaded again
        self._loaded = files.load()

    def current(self) -> Loaded:
        """What the files hold now or, if they cannot be used, what they held last. Never raises TlsFileError."""
        with self._lock:
            stamps = self._files.stamps()
            if stamps != self._stamps:
                self._stamps = stamps
                self._load()
            return self._loaded

    def validities(self) -> dict[str, Validity]:
        """By "certificate" and, with client certificates, "client_ca"."""
        loaded = self.current()
        found = {"certificate": loaded.validity}
        if loaded.authorities_validity is not None:
            found["client_ca"] = loaded.authorities_validity
        return found

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Credentials for a port of a gRPC server. Each connection gets the certificate of its time."""
        given = self.current()

        def replacement() -> grpc.ServerCertificateConfiguration | None:  # None: no change
            nonlocal given
            loaded = self.current()
            if loaded is given:
                return None
            given = loaded
            return _configuration(loaded)

        # gRPC for Python cannot ask for a certificate without demanding one.
        demands_certificate = bool(given.authorities)
        return grpc.dynamic_ssl_server_credentials(
            _configuration(given),
            replacement,  # type: ignore[arg-type]  # the stubs leave None out
            demands_certificate,
        )

    def ssl_context(self, protocols: Sequence[str] = ("http/1.1",)) -> ssl.SSLContext:
        """A context for a server of asyncio. Each connection gets the certificate of its time.  protocols: for ALPN

        Raises TlsFileError if the files are replaced meanwhile.
        """
        given = self.current()
        context = self._context(given, protocols)
        now = (given, context)

        def replace(connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, outer: ssl.SSLContext) -> None:
            nonlocal now
            loaded = self.current()
            if loaded is not now[0]:
                with contextlib.suppress(TlsFileError):  # replaced once more meanwhile: the next connection sees it
                    now = (loaded, self._context(loaded, protocols))
            connection.context = now[1]

        # ssl has no other hook at the start of a handshake. It is called for clients that name no server too.
        context.sni_callback = replace
        return context

    def _context(self, loaded: Loaded, protocols: Sequence[str]) -> ssl.SSLContext:
        """Raises TlsFileError if the files are replaced meanwhile: ssl reads a key from a file only."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(list(protocols))
        load_pair(context, self._files.cert, self._files.key)
        if loaded.authorities:
            # A resumed session is not verified again, so it would outlive the authority of its client. TLS 1.3 without
            # tickets has no resumption; a server of OpenSSL cannot refuse that of TLS 1.2.
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.num_tickets = 0
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(cadata=loaded.authorities.decode("ascii"))
        return context

    def _load(self) -> None:
        log = get_logger()
        try:
            self._loaded = self._files.load()
        except TlsFileError as error:
            log.warning("the replaced certificate cannot be used; the last one stays", problem=str(error))
            return
        left_s = self._loaded.validity.until_unix_s - self._now_unix_s()
        tell = log.info if left_s > 0 else log.warning
        tell("certificate replaced", file=self._files.cert, expires_in_s=round(left_s))


def _configuration(loaded: Loaded) -> grpc.ServerCertificateConfiguration:
    pairs = [(loaded.pair.key, loaded.pair.chain)]
    return grpc.ssl_server_certificate_configuration(pairs, root_certificates=loaded.authorities or None)


def stamp_of(path: str) -> tuple[int, int, int] | None:
    """Changes when the file is replaced."""
    try:
        found = os.stat(path)  # follows symbolic links
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def first_to_expire(pem: bytes, path: str) -> Validity:
    """The validity of the certificate that expires first. Raises TlsFileError."""
    try:
        found = [
            Validity(one.not_valid_before_utc.timestamp(), one.not_valid_after_utc.timestamp())
            for one in x509.load_pem_x509_certificates(pem)
        ]
    except ValueError:
        raise TlsFileError(f"{path} has a certificate that cannot be read") from None
    return min(found, key=lambda validity: validity.until_unix_s)
