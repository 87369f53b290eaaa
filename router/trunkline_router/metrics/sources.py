"""Which parts of a router its metrics are read from."""

from trunkline_router.api.inference import Inference
from trunkline_router.gate.request_gate import RequestGate
from trunkline_router.metrics.gate_gauges import GateGauges
from trunkline_router.metrics.process_gauges import ProcessGauges
from trunkline_router.metrics.request_labels import MAX_TENANTS
from trunkline_router.metrics.router_metrics import RouterMetrics
from trunkline_router.metrics.shared_names import SharedNames
from trunkline_router.metrics.shared_state_gauges import SharedStateGauges
from trunkline_router.metrics.snapshot_files import NAMES, SnapshotPlace
from trunkline_router.metrics.worker_gauges import WorkerGauges
from trunkline_runtime.loop_lag import LoopLag
from trunkline_runtime.telemetry.bounded_names import BoundedNames
from trunkline_runtime.tls import ServerTls


def metrics_of(
    inference: Inference,
    gate: RequestGate,
    lag: LoopLag,
    *,
    tls: ServerTls | None = None,
    place: SnapshotPlace | None = None,
) -> RouterMetrics:
    """The metrics of a router process.  tls: of its ports;  place: see Scrape"""
    listed = gate.access.tenants.named
    if place is None:
        tenants = BoundedNames(MAX_TENANTS, listed)
    else:
        tenants = SharedNames(place.directory / NAMES, MAX_TENANTS, listed)
    dispatcher = inference.dispatcher
    return RouterMetrics(
        tenants,
        [
            GateGauges(gate, inference.running, dispatcher).families,
            WorkerGauges(inference.pools, dispatcher.clock_s).families,
            SharedStateGauges(inference.shared, tenants).families,
            ProcessGauges(lag, tls).families,
        ],
    )
