"""TLS of a client's connections to routers and workers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import grpc

from trunkline.tls_files import TlsFileError, read_authorities, read_pair

Options = Sequence[tuple[str, Any]]  # of a channel


@dataclass(frozen=True, slots=True)
class ClientTls:
    """Files and names for TLS. ClientTls() verifies servers by the public authorities that come with gRPC.

    ca_file: certificates of the authorities that servers are verified with, in PEM
    cert_file, key_file: the client's certificate and its key, for servers that demand one (mTLS)
    server_name: the name that the server's certificate must have; empty: the host that the client connects to
    worker_name: likewise for workers, to which direct clients connect at the addresses that their routers send
    """

    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    server_name: str = ""
    worker_name: str = ""

    def __post_init__(self) -> None:
        if bool(self.cert_file) != bool(self.key_file):
            raise TlsFileError("a client's certificate and its key must be given together")

    def for_workers(self) -> "ClientTls":
        """The TLS of a direct client's connections to workers."""
        return replace(self, server_name=self.worker_name)

    def credentials(self) -> grpc.ChannelCredentials:
        """Credentials with what the files hold now. A channel keeps them: a rotated certificate counts for channels
        that are opened later. Raises TlsFileError."""
        authorities = read_authorities(self.ca_file) if self.ca_file else None
        if not self.cert_file:
            return grpc.ssl_channel_credentials(authorities)
        pair = read_pair(self.cert_file, self.key_file)
        return grpc.ssl_channel_credentials(authorities, pair.key, pair.chain)

    def options(self) -> Options:
        """The channel options that go with the credentials."""
        return (("grpc.ssl_target_name_override", self.server_name),) if self.server_name else ()


def open_channel(address: str, options: Options = (), tls: ClientTls | None = None) -> grpc.aio.Channel:
    """An asynchronous channel: with TLS, or in plaintext if `tls` is None. Raises TlsFileError."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, tls.credentials(), options=(*options, *tls.options()))


def open_blocking_channel(address: str, options: Options = (), tls: ClientTls | None = None) -> grpc.Channel:
    """The same as open_channel(), for blocking calls."""
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, tls.credentials(), options=(*options, *tls.options()))
