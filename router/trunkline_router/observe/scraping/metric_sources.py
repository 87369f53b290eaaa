"""Which parts of a router its metrics are read from, and which labels they have."""

from collections.abc import Callable, Iterable, Sequence

from prometheus_client.core import Metric

from trunkline_router.access.gate.request_gate import RequestGate
from trunkline_router.access.identity.needed_roles import METHODS, PATHS
from trunkline_router.access.tenants import Tenants
from trunkline_router.observe.metrics.request_labels import MAX_TENANTS, LabelRules
from trunkline_router.observe.scraping.gate_gauges import GateGauges
from trunkline_router.observe.scraping.process_gauges import ProcessGauges
from trunkline_router.observe.scraping.shared_names import SharedNames
from trunkline_router.observe.scraping.shared_state_gauges import SharedStateGauges
from trunkline_router.observe.scraping.snapshot_files import NAMES, SnapshotPlace
from trunkline_router.observe.scraping.worker_gauges import WorkerGauges
from trunkline_router.request.inference import Inference
from trunkline_router.settings import RouterSettings
from trunkline_runtime.telemetry.bounded_names import BoundedNames
from trunkline_runtime.telemetry.certificate_expiry import CertificateExpiry
from trunkline_runtime.tls import ServerTls

# As records name them: paths, and RPCs without a leading slash.
ENDPOINTS = frozenset({name.partition(" ")[2] for name in PATHS} | {name[1:] for name in METHODS})

Source = Callable[[], Iterable[Metric]]  # reads metrics of now


def label_rules(tenants: Tenants, place: SnapshotPlace | None = None) -> LabelRules:
    """Tenants that the tenants file lists have labels of their own first.  place: see Scrape"""
    if place is None:
        return LabelRules(BoundedNames(MAX_TENANTS, tenants.named), ENDPOINTS)
    return LabelRules(SharedNames(place.directory / NAMES, MAX_TENANTS, tenants.named), ENDPOINTS)


def sources_of_metrics(
    inference: Inference, gate: RequestGate, tenants: BoundedNames, process: ProcessGauges
) -> Sequence[Source]:
    """Of a router process.  tenants: those with labels of their own"""
    dispatcher = inference.dispatcher
    return (
        GateGauges(gate, inference.running, dispatcher).families,
        WorkerGauges(inference.pools, dispatcher.clock_s).families,
        SharedStateGauges(inference.shared, tenants).families,
        process.families,
    )


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
