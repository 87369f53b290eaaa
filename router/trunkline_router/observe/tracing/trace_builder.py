"""Writes the spans of one trace from times on the router's clock."""

from collections.abc import Mapping

from opentelemetry.trace import SpanKind
from opentelemetry.util.types import AttributeValue

from trunkline_router.record.request_record import RequestRecord
from trunkline_runtime.telemetry.otlp_spans import UNSET, TraceWriter, event, link
from trunkline_runtime.telemetry.trace_context import new_span_id


class TraceBuilder:
    """The spans of a request so far. Spans and events that would end before they begin last no time."""

    __slots__ = ("_writer", "_zero_ns", "_zero_s", "record", "spans")

    def __init__(self, record: RequestRecord) -> None:
        self.record = record
        self.spans: list[bytes] = []
        self._zero_s, self._zero_ns = record.started_s, record.started_unix_ns
        self._writer = TraceWriter(record.trace_id, record.tracestate)

    def event(self, name: str, time_s: float, attributes: Mapping[str, AttributeValue] | None = None) -> bytes:
        return event(name, self._zero_ns + int((time_s - self._zero_s) * 1e9), attributes)

    def link(self, span_id: int) -> bytes:
        return link(self.record.trace_id, span_id)

    def add(
        self,
        name: str,
        parent_id: int,
        start_s: float,
        end_s: float,
        *fields: bytes,
        span_id: int = 0,
        kind: SpanKind = SpanKind.INTERNAL,
        status: bytes = UNSET,
        is_parent_remote: bool = False,
    ) -> int:
        """Adds a span; returns its id.

        parent_id: 0 for none
        fields: attributes, events and links, as they are written
        span_id: 0 for a new one
        """
        span_id = span_id or new_span_id()
        start_ns = self._zero_ns + int((start_s - self._zero_s) * 1e9)
        end_ns = self._zero_ns + int((max(start_s, end_s) - self._zero_s) * 1e9)
        self.spans.append(
            self._writer.span(
                name, span_id, parent_id, start_ns, end_ns, fields, kind, status, is_parent_remote=is_parent_remote
            )
        )
        return span_id
