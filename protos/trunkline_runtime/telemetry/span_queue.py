"""Exports spans on a thread of its own, so that no request waits for a collector.

What cannot be exported is counted and forgotten: the queue is bounded, an export has a time limit, and a collector that
is down, slow or hostile costs no more than that.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from trunkline_runtime.log import get_logger
from trunkline_runtime.telemetry.otel_variables import number_of

# The standard variables, and their defaults. Waiting parts: a request's spans in a router, one span in a worker.
MAX_WAITING_VARIABLE, MAX_WAITING = "OTEL_BSP_MAX_QUEUE_SIZE", 2048
INTERVAL_VARIABLE, INTERVAL_MS = "OTEL_BSP_SCHEDULE_DELAY", 1000  # between two exports, unless a batch is full
# Making and encoding a batch of spans takes a few milliseconds of the interpreter's time.
BATCH_VARIABLE, BATCH_SPANS = "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 512
MOST = 1_000_000  # of each variable
LAST_EXPORT_S = 3.0  # time for what waits when the process ends
VAIN_EXPORT_S = 0.2  # the same if the collector took nothing lately

Spans = Callable[[Resource], Sequence[ReadableSpan]]  # makes spans of a process, when they are exported


@dataclass(slots=True)
class ExportCounts:
    """What became of the spans so far.

    exported: the collector took them. failed: it did not. dropped: parts that were not queued, because the queue was
    full; a part is a request's spans in a router, and one span in a worker. withheld: parts that were not queued,
    because the router exports so many requests a second at most
    """

    exported: int = 0
    failed: int = 0
    dropped: int = 0
    withheld: int = 0


def span_queue(exporter: SpanExporter, resource: Resource) -> "SpanQueue":
    """A queue as the variables say. Raises VariableError."""
    max_waiting = number_of(MAX_WAITING_VARIABLE, MAX_WAITING, MOST)
    interval_s = number_of(INTERVAL_VARIABLE, INTERVAL_MS, MOST) / 1e3
    batch_spans = number_of(BATCH_VARIABLE, BATCH_SPANS, MOST)
    return SpanQueue(exporter, resource, max_waiting=max_waiting, interval_s=interval_s, batch_spans=batch_spans)


class SpanQueue:
    """A bounded queue before an exporter. put() may be called on any thread and returns at once.

    resource: the process, which spans are made with
    """

    def __init__(
        self,
        exporter: SpanExporter,
        resource: Resource,
        *,
        max_waiting: int = MAX_WAITING,
        interval_s: float = INTERVAL_MS / 1e3,
        batch_spans: int = BATCH_SPANS,
    ) -> None:
        self.counts = ExportCounts()
        self._exporter = exporter
        self._resource = resource
        self._max_waiting = max_waiting
        self._interval_s = interval_s
        self._batch_spans = batch_spans
        self._due_at = min(batch_spans, max_waiting)
        self._waiting: deque[Spans] = deque()
        self._is_due = threading.Event()
        self._has_ended = threading.Event()
        self._is_reachable = True  # as of the last export
        self._thread = threading.Thread(target=self._run, name="span export", daemon=True)
        self._thread.start()

    def put(self, spans: Spans) -> bool:
        """Queues spans, unless too many wait. Returns whether it does."""
        if len(self._waiting) >= self._max_waiting or self._has_ended.is_set():
            self.counts.dropped += 1
            return False
        self._waiting.append(spans)
        if len(self._waiting) == self._due_at:
            self._is_due.set()
        return True

    def withhold(self) -> None:
        """Counts a part that is not queued, whether there is room or not."""
        self.counts.withheld += 1

    def close(self, within_s: float = LAST_EXPORT_S) -> None:
        """Exports what waits, for a short time at most, and ends. Later spans are dropped."""
        self._has_ended.set()
        self._is_due.set()
        self._thread.join(within_s if self._is_reachable else min(within_s, VAIN_EXPORT_S))
        self._exporter.shutdown()

    def _run(self) -> None:
        while self._waiting or not self._has_ended.is_set():
            self._is_due.wait(0.0 if self._has_ended.is_set() else self._interval_s)
            self._is_due.clear()
            for batch in self._batches():
                self._export(batch)

    def _batches(self) -> Iterator[list[ReadableSpan]]:
        """Empties the queue, batch by batch."""
        batch: list[ReadableSpan] = []
        while self._waiting:
            spans = self._waiting.popleft()
            try:
                batch += spans(self._resource)
            except Exception as error:
                get_logger().error("spans cannot be made", exc_info=error)
                self.counts.dropped += 1
            if len(batch) >= self._batch_spans:
                yield batch
                batch = []
        if batch:
            yield batch

    def _export(self, batch: Sequence[ReadableSpan]) -> None:
        try:
            is_exported = self._exporter.export(batch) is SpanExportResult.SUCCESS
        except Exception as error:  # the thread must live on, whatever the collector answers
            get_logger().error("unexpected error in an export of spans", exc_info=error)
            is_exported = False
        if is_exported:
            self.counts.exported += len(batch)
        else:
            self.counts.failed += len(batch)
        if is_exported != self._is_reachable:
            self._is_reachable = is_exported
            if is_exported:
                get_logger().info("spans are exported again", failed=self.counts.failed)
            else:
                get_logger().warning("spans cannot be exported: the collector does not take them")
