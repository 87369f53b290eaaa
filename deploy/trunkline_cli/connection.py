"""Flags of commands that call a router or a worker: TLS, and for routers the address and the key."""

import argparse
import os
import socket
import ssl
from pathlib import Path
from typing import Any

from trunkline.client.api_key import leaves_in_plaintext
from trunkline.client.client import Client
from trunkline.tls import ClientTls
from trunkline_cli.arguments import HOST_AND_PORT, server, text

API_KEY_VARIABLE = "TRUNKLINE_API_KEY"
HANDSHAKE_S = 2.0  # time for a server to show that it speaks TLS
# Flag → field of ClientTls, the variable that sets it where the flag is absent, and its meaning. TRUNKLINE_TLS_CERT and
# TRUNKLINE_TLS_KEY are settings of servers.
TLS_FILES = {
    "--tls-ca": ("ca_file", "TRUNKLINE_CLIENT_TLS_CA", "authorities that verify the server, in PEM; implies --tls"),
    "--tls-cert": (
        "cert_file", "TRUNKLINE_CLIENT_TLS_CERT", "certificate to present to the server, in PEM; implies --tls"
    ),
    "--tls-key": ("key_file", "TRUNKLINE_CLIENT_TLS_KEY", "key of --tls-cert, in PEM"),
}  # fmt: skip


def add_connection_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that client_of() reads."""
    parser.add_argument(
        "--server", type=server, default="127.0.0.1:50051", metavar="HOST:PORT", help="router (default: %(default)s)"
    )
    parser.add_argument(
        "--api-key-file", type=text, metavar="FILE",
        help=f"file with the API key; default: the key in {API_KEY_VARIABLE}. No flag takes the key itself, because "
        "other users of the machine can read the arguments of processes",
    )  # fmt: skip
    parser.add_argument(
        "--allow-insecure-key", action="store_true", help="send the key without TLS also to other machines"
    )
    add_tls_arguments(parser)


def add_tls_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that tls_of() reads."""
    parser.add_argument(
        "--tls", action="store_true", help="connect with TLS; without --tls-ca, public authorities are trusted"
    )
    for flag, (field, variable, meaning) in TLS_FILES.items():
        parser.add_argument(
            flag, dest=field, type=text, metavar="FILE", default=os.environ.get(variable, ""),
            help=f"{meaning}; default: {variable}",
        )  # fmt: skip
    parser.add_argument(
        "--tls-server-name", dest="server_name", type=text, default="", metavar="NAME",
        help="name that the server's certificate must have; default: the host of the address. Implies --tls",
    )  # fmt: skip


def client_of(arguments: argparse.Namespace, **options: Any) -> Client:
    """A client for the flags; `options` are further arguments of the client. Raises ValueError."""
    key, tls = _api_key(arguments.api_key_file), tls_of(arguments)
    if not arguments.allow_insecure_key and leaves_in_plaintext(arguments.server, tls, key):
        raise ValueError(
            f"the API key would be sent to {arguments.server} in plaintext: use --tls, or --allow-insecure-key if the "
            "network is protected otherwise"
        )
    return Client(arguments.server, api_key=key, tls=tls, allow_insecure_key=arguments.allow_insecure_key, **options)


def tls_of(arguments: argparse.Namespace) -> ClientTls | None:
    """TLS as the arguments say; None for plaintext. Raises TlsFileError."""
    files = {field: getattr(arguments, field) for field, _, _ in TLS_FILES.values()}
    if not arguments.tls and not any(files.values()) and not arguments.server_name:
        return None
    return ClientTls(**files, server_name=arguments.server_name)


def connection_problem(address: str, problem: str, arguments: argparse.Namespace) -> str:
    """Why a connection failed: `problem`, or that the server speaks TLS where the arguments do not ask for it. gRPC
    itself does not tell such a server from one that is not there."""
    if tls_of(arguments) is None and speaks_tls(address):
        return f"{address} speaks TLS: use --tls, with --tls-ca FILE unless a public authority signed its certificate"
    return problem


def speaks_tls(address: str) -> bool:
    """Whether a server at host:port completes a TLS handshake, whatever its certificate. It is sent nothing."""
    match = HOST_AND_PORT.fullmatch(address)
    if match is None:
        return False
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])  # without it a gRPC server refuses the handshake
    try:
        with socket.create_connection((match[1].strip("[]"), int(match[2])), timeout=HANDSHAKE_S) as plain:
            context.wrap_socket(plain).close()
    except (OSError, UnicodeError):  # an SSLError is an OSError; UnicodeError: no name of a host
        return False
    return True


def _api_key(file: str | None) -> str | None:
    """The key; None if there is none."""
    if file is None:
        return os.environ.get(API_KEY_VARIABLE) or None
    try:
        key = Path(file).read_text("utf-8").strip()
    except OSError as error:
        raise ValueError(f"--api-key-file {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"--api-key-file {file}: not UTF-8") from None
    if not key:
        raise ValueError(f"--api-key-file {file}: the file is empty")
    return key
