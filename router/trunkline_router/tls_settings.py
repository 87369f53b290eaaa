"""Settings of a router's TLS to workers, and the rule for plaintext."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trunkline_router.address import DNS_PREFIX
from trunkline_runtime.settings import setting
from trunkline_runtime.tls_settings import is_loopback, needs_problem, pair_problem

if TYPE_CHECKING:
    from trunkline.tls import ClientTls

NOT_LOOPBACK = "not on the loopback interface: set --worker-tls-ca, or permit plaintext with --allow-plaintext"


@dataclass(frozen=True, slots=True)
class WorkerTlsSettings:
    """How the router connects to workers."""

    worker_tls_ca: str = setting(
        "",
        metavar="FILE",
        help="file with the authorities of workers' certificates, in PEM; the router then uses TLS to all workers",
    )
    worker_tls_cert: str = setting(
        "",
        metavar="FILE",
        help="file with the certificate that the router presents to workers, in PEM; read for each connection",
    )
    worker_tls_key: str = setting(
        "", metavar="FILE", help="file with the key of --worker-tls-cert, in PEM, not encrypted"
    )
    worker_tls_name: str = setting(
        "",
        metavar="NAME",
        help="name that every worker's certificate must have; default: the host of the worker's address",
    )

    def client_tls(self) -> "ClientTls | None":
        """TLS of connections to workers; None for plaintext."""
        if not self.worker_tls_ca:
            return None
        from trunkline.tls import ClientTls  # settings are read before grpc is needed

        return ClientTls(self.worker_tls_ca, self.worker_tls_cert, self.worker_tls_key, self.worker_tls_name)

    def problem(self, workers: Sequence[str], *, allow_plaintext: bool) -> str | None:
        """What is wrong with these settings, in one line; None if they can be used. What dns: entries resolve to is
        checked before each connection."""
        ca_flag = "--worker-tls-ca"
        problem = (
            pair_problem("--worker-tls-cert", self.worker_tls_cert, "--worker-tls-key", self.worker_tls_key)
            or needs_problem("--worker-tls-cert", self.worker_tls_cert, ca_flag, self.worker_tls_ca)
            or needs_problem("--worker-tls-name", self.worker_tls_name, ca_flag, self.worker_tls_ca)
        )
        if problem or self.worker_tls_ca or allow_plaintext:
            return problem
        for entry in workers:
            if not entry.startswith(DNS_PREFIX) and not is_loopback(entry.rpartition(":")[0]):
                return f"--workers={entry} is {NOT_LOOPBACK}"
        return None
