"""Metrics of the process itself."""

from collections.abc import Iterable
from importlib.metadata import version

from prometheus_client import ProcessCollector
from prometheus_client.core import Metric

from trunkline_runtime.loop_lag import LoopLag
from trunkline_runtime.telemetry.certificate_expiry import CertificateExpiry
from trunkline_runtime.telemetry.exposition import counter, gauge
from trunkline_runtime.telemetry.process_families import certificate_families, log_family, spans_family
from trunkline_runtime.telemetry.span_queue import ExportCounts

OF_PROCESS = frozenset(
    {"process_cpu_seconds", "process_resident_memory_bytes", "process_open_fds", "process_start_time_seconds"}
)


class ProcessGauges:
    """spans: what became of spans; None: they are not exported
    restarts: how often the process was started again; None: it is the only one of its router
    """

    def __init__(
        self,
        lag: LoopLag,
        certificates: CertificateExpiry,
        spans: ExportCounts | None = None,
        restarts: int | None = None,
    ) -> None:
        self._lag = lag
        self._certificates = certificates
        self._spans = spans
        self._restarts = restarts
        self._process = ProcessCollector(registry=None)  # registered nowhere

    def families(self) -> Iterable[Metric]:
        """All families."""
        yield gauge(
            "trunkline_router_event_loop_lag_seconds",
            "Longest time that a due callback waited in the last minute.",
            (),
            [((), self._lag.recent_s())],
        )
        yield gauge("trunkline_router_processes", "Always 1: the sum is the number of processes.", (), [((), 1.0)])
        yield counter(
            "trunkline_router_process_restarts",
            "How often this process of the router died and was replaced. Absent if the router is one process.",
            (),
            [] if self._restarts is None else [((), float(self._restarts))],
        )
        yield gauge(
            "trunkline_router_build_info", "The router's version, as a label.", ("version",),
            [((version("trunkline"),), 1.0)],
        )  # fmt: skip
        yield from certificate_families(self._certificates)
        yield spans_family("trunkline_router_spans", self._spans)
        yield log_family("trunkline_router_dropped_log_lines")
        yield from (family for family in self._process.collect() if family.name in OF_PROCESS)
