"""All metrics of a router process: what is counted when requests end, and what is read when it is scraped."""

from itertools import chain

from trunkline_router.access.gate.request_gate import RequestGate
from trunkline_router.observe.metrics.request_metrics import RequestCounts
from trunkline_router.observe.metrics.router_gauges import (
    build_families,
    gate_families,
    quota_families,
    redis_families,
)
from trunkline_router.observe.metrics.worker_gauges import WorkerGauges
from trunkline_router.request.inference import Inference
from trunkline_router.settings import RouterSettings
from trunkline_runtime.telemetry.exposition import Collect, Families
from trunkline_runtime.telemetry.process_families import CertificateExpiry, ProcessMetrics
from trunkline_runtime.tls import ServerTls


def collector(
    counted: RequestCounts,
    inference: Inference,
    gate: RequestGate,
    process: ProcessMetrics,
    restarts: int | None = None,
) -> Collect:
    """Returns what makes all metrics of a router process, one by one.

    restarts: how often the process was started again; None: it is the only one of its router
    """
    workers = WorkerGauges(inference.pools, inference.dispatcher.clock_s)

    async def collect() -> Families:
        return chain(
            counted.families(),
            gate_families(gate, inference),
            workers.families(),
            quota_families(inference.shared, counted.rules.tenants),
            redis_families(inference.shared),
            process.families(),
            build_families(restarts),
        )

    return collect


def certificates_of(settings: RouterSettings, tls: ServerTls | None) -> CertificateExpiry:
    """All certificates that a router presents or trusts, apart from those of identities."""
    workers, redis = settings.worker_tls, settings.redis_tls
    files = {
        "worker_tls_certificate": workers.worker_tls_cert,
        "worker_tls_ca": workers.worker_tls_ca,
        "redis_tls_certificate": redis.redis_tls_cert,
        "redis_tls_ca": redis.redis_tls_ca,
    }
    return CertificateExpiry(tls, files)
