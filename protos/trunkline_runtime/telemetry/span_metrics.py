"""What became of the spans of a process, as a metric."""

from dataclasses import asdict

from prometheus_client.core import Metric

from trunkline_runtime.telemetry.exposition import counter
from trunkline_runtime.telemetry.span_queue import ExportCounts


def spans_family(name: str, counts: ExportCounts) -> Metric:
    """One counter, by outcome."""
    return counter(
        name,
        "Spans by outcome: exported, failed because the collector did not take them, dropped because too many waited.",
        ("outcome",),
        [((outcome,), float(count)) for outcome, count in asdict(counts).items()],
    )
