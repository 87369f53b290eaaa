"""Arguments for connections with TLS."""

import argparse

from trunkline.tls import ClientTls
from trunkline.tls_files import TlsFileError
from trunkline_cli.arguments import text

_FLAGS = {
    "--tls-ca": "authorities of the server's certificate, in PEM; with it the connection uses TLS",
    "--tls-cert": "certificate to present to the server, in PEM",
    "--tls-key": "key of --tls-cert, in PEM",
    "--tls-server-name": "name that the server's certificate must have; default: the host of the address",
}


def add_tls_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that tls_of() reads."""
    for flag, help_text in _FLAGS.items():
        parser.add_argument(
            flag, type=text, default="", metavar="NAME" if flag == "--tls-server-name" else "FILE", help=help_text
        )


def tls_of(arguments: argparse.Namespace) -> ClientTls | None:
    """TLS as the arguments say; None for plaintext. Raises TlsFileError."""
    if not arguments.tls_ca:
        if arguments.tls_cert or arguments.tls_key or arguments.tls_server_name:
            raise TlsFileError("--tls-cert, --tls-key and --tls-server-name need --tls-ca")
        return None
    return ClientTls(arguments.tls_ca, arguments.tls_cert, arguments.tls_key, arguments.tls_server_name)
