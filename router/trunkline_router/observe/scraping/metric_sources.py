"""Which parts of a router its metrics are read from, and which labels they have."""

from itertools import chain

from trunkline_router.access.gate.request_gate import RequestGate
from trunkline_router.access.identity.needed_roles import METHODS, PATHS
from trunkline_router.access.tenants import Tenants
from trunkline_router.observe.metrics.request_counts import RequestCounts
from trunkline_router.observe.metrics.request_labels import MAX_TENANTS, LabelRules
from trunkline_router.observe.scraping.gate_gauges import GateGauges
from trunkline_router.observe.scraping.process_gauges import ProcessGauges
from trunkline_router.observe.scraping.shared_state_gauges import SharedStateGauges
from trunkline_router.observe.scraping.worker_gauges import WorkerGauges
from trunkline_router.request.inference import Inference
from trunkline_router.settings import RouterSettings
from trunkline_runtime.telemetry.bounded_names import BoundedNames
from trunkline_runtime.telemetry.certificate_expiry import CertificateExpiry
from trunkline_runtime.telemetry.exposition import Families
from trunkline_runtime.telemetry.fresh_answers import Collect
from trunkline_runtime.tls import ServerTls

# As records name them: paths, and RPCs without a leading slash.
ENDPOINTS = frozenset({name.partition(" ")[2] for name in PATHS} | {name[1:] for name in METHODS})


def label_rules(tenants: Tenants) -> LabelRules:
    """Tenants that the tenants file lists have labels of their own first."""
    return LabelRules(BoundedNames(MAX_TENANTS, tenants.named), ENDPOINTS)


def collector(counted: RequestCounts, inference: Inference, gate: RequestGate, process: ProcessGauges) -> Collect:
    """Returns what makes all metrics of a router process, one by one."""
    dispatcher = inference.dispatcher
    sources = (
        counted,
        GateGauges(gate, inference.running, dispatcher),
        WorkerGauges(inference.pools, dispatcher.clock_s),
        SharedStateGauges(inference.shared, counted.tenants),
        process,
    )

    async def collect() -> Families:
        return chain.from_iterable(source.families() for source in sources)

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
