"""Which parts of a router its metrics are read from, and which labels they have."""

from collections.abc import Callable, Iterable, Sequence

from prometheus_client.core import Metric

from trunkline_router.api.inference import Inference
from trunkline_router.gate.request_gate import RequestGate
from trunkline_router.identity.endpoints import METHODS, PATHS
from trunkline_router.metrics.request_labels import MAX_TENANTS, LabelRules
from trunkline_router.request.tenants import Tenants
from trunkline_router.scraping.gate_gauges import GateGauges
from trunkline_router.scraping.process_gauges import ProcessGauges
from trunkline_router.scraping.shared_names import SharedNames
from trunkline_router.scraping.shared_state_gauges import SharedStateGauges
from trunkline_router.scraping.snapshot_files import NAMES, SnapshotPlace
from trunkline_router.scraping.worker_gauges import WorkerGauges
from trunkline_runtime.telemetry.bounded_names import BoundedNames

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
