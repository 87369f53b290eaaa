"""Writes the spans of one trace from times on the router's clock."""

from collections.abc import Mapping

from opentelemetry.trace import SpanKind
from opentelemetry.util.types import AttributeValue

from trunkline_router.telemetry.request_record import RequestRecord
from trunkline_runtime.telemetry import otlp_spans
from trunkline_runtime.telemetry.otlp_spans import UNSET, TraceWriter
from trunkline_runtime.telemetry.trace_context import new_span_id


class TraceBuilder:
    """The spans of a request so far. Spans and events that would end before they begin last no time."""

    __slots__ = ("_unix_ns", "_writer", "record", "spans")

    def __init__(self, record: RequestRecord) -> None:
        self.record = record
        self.spans: list[bytes] = []
        self._unix_ns = record.unix_ns
        self._writer = TraceWriter(record.trace_id, record.tracestate)

    def event(self, name: str, time_s: float, attributes: Mapping[str, AttributeValue] | None = None) -> bytes:
        return otlp_spans.event(name, self._unix_ns(time_s), attributes)

    def link(self, span_id: int) -> bytes:
        return otlp_spans.link(self.record.trace_id, span_id)

    def add(
        self,
        name: str,
        parent_id: int,
        start_s: float,
        end_s: float,
        attributes: Mapping[str, AttributeValue],
        *fields: bytes,
        span_id: int = 0,
        kind: SpanKind = SpanKind.INTERNAL,
        status: bytes = UNSET,
        is_parent_remote: bool = False,
    ) -> int:
        """Adds a span; returns its id.

        parent_id: 0 for none
        fields: events, links, and attributes that are written already
        span_id: 0 for a new one
        """
        made = span_id or new_span_id()
        start_ns = self._unix_ns(start_s)
        end_ns = max(start_ns, self._unix_ns(end_s))
        told = otlp_spans.span_attributes(attributes)
        written = self._writer.span(
            name,
            made,
            parent_id,
            start_ns,
            end_ns,
            told,
            *fields,
            kind=kind,
            status=status,
            is_parent_remote=is_parent_remote,
        )
        self.spans.append(written)
        return made
