"""Settings of TLS that routers and workers share, and the rule for plaintext."""

from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING

from trunkline_runtime.settings import setting

if TYPE_CHECKING:
    from trunkline_runtime.tls import ServerTls


@dataclass(frozen=True, slots=True)
class ServerTlsSettings:
    """How a server's own port is secured."""

    tls_cert: str = setting(
        "",
        metavar="FILE",
        help="file with the server's certificate and its chain, in PEM; loaded again when it is replaced",
    )
    tls_key: str = setting("", metavar="FILE", help="file with the key of --tls-cert, in PEM, not encrypted")
    tls_client_ca: str = setting(
        "",
        metavar="FILE",
        help="file with the authorities of clients' certificates, in PEM: every client must then present one",
    )
    allow_plaintext: bool = setting(
        False, help="permit connections without TLS that are not on the loopback interface, incoming and outgoing"
    )
    health_port: int = setting(
        0,
        help="a port with the gRPC health service alone, without TLS, for orchestrators whose probes cannot use TLS; "
        "0: none",
        minimum=0,
        maximum=65535,
    )

    def server_tls(self) -> "ServerTls | None":
        """The server's certificate; None without one. Raises TlsFileError."""
        if not self.tls_cert:
            return None
        from trunkline_runtime.tls import ServerTls, TlsFiles  # settings are read before grpc is needed

        return ServerTls(TlsFiles(self.tls_cert, self.tls_key, self.tls_client_ca))

    def problem(self, host: str) -> str | None:
        """Why a server with these settings must not listen on the host, in one line; None if it may."""
        return (
            pair_problem("--tls-cert", self.tls_cert, "--tls-key", self.tls_key)
            or needs_problem("--tls-client-ca", self.tls_client_ca, "--tls-cert", self.tls_cert)
            or self._plaintext_problem(host)
        )

    def _plaintext_problem(self, host: str) -> str | None:
        if self.tls_cert or self.allow_plaintext or is_loopback(host):
            return None
        return (
            f"--host={host} can be reached from elsewhere without TLS: set --tls-cert and --tls-key, or allow it with "
            "--allow-plaintext"
        )


def pair_problem(cert_flag: str, cert: str, key_flag: str, key: str) -> str | None:
    """The problem if one of two settings is given without the other."""
    return needs_problem(cert_flag, cert, key_flag, key) or needs_problem(key_flag, key, cert_flag, cert)


def needs_problem(flag: str, value: object, needed_flag: str, needed: object) -> str | None:
    """The problem if a setting is given without another one that it needs."""
    return f"{flag} needs {needed_flag}" if value and not needed else None


def is_loopback(host: str) -> bool:
    """Whether connections to the host stay on this machine. Names other than localhost count as elsewhere: what they
    resolve to can change."""
    try:
        return ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"
