"""Makes the spans of one trace from times on the router's clock."""

from collections.abc import Mapping, Sequence

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, TraceFlags, TraceState
from opentelemetry.util.types import AttributeValue

from trunkline_router.record.request_record import RequestRecord
from trunkline_runtime.telemetry.trace_context import new_span_id
from trunkline_runtime.tracing import SCOPE

Attributes = Mapping[str, AttributeValue | None]  # None: it is left out

SAMPLED_FLAG = TraceFlags(TraceFlags.SAMPLED)
UNSET = Status()


class TraceBuilder:
    """The spans of a request so far, from times on the router's clock. Spans and events that would end before they
    begin last no time."""

    def __init__(self, record: RequestRecord, resource: Resource) -> None:
        self.record = record
        self.spans: list[ReadableSpan] = []
        self._resource = resource
        self._state = TraceState.from_header([record.tracestate]) if record.tracestate else None

    def _context(self, span_id: int, *, is_remote: bool = False) -> SpanContext:
        return SpanContext(self.record.trace_id, span_id, is_remote, SAMPLED_FLAG, self._state)

    def event(self, name: str, time_s: float, attributes: Attributes | None = None) -> Event:
        return Event(name, _known(attributes), self.record.unix_ns(time_s))

    def link(self, span_id: int) -> Link:
        return Link(self._context(span_id))

    def add(
        self,
        name: str,
        parent_id: int,
        start_s: float,
        end_s: float,
        attributes: Attributes | None = None,
        *,
        events: Sequence[Event] = (),
        links: Sequence[Link] = (),
        span_id: int = 0,
        kind: SpanKind = SpanKind.INTERNAL,
        status: Status = UNSET,
        is_parent_remote: bool = False,
    ) -> int:
        """Adds a span; returns its id.  parent_id: 0 for none;  span_id: 0 for a new one"""
        span_id = span_id or new_span_id()
        self.spans.append(
            ReadableSpan(
                name,
                context=self._context(span_id),
                parent=self._context(parent_id, is_remote=is_parent_remote) if parent_id else None,
                resource=self._resource,
                attributes=_known(attributes),
                events=events,
                links=links,
                kind=kind,
                status=status,
                start_time=self.record.unix_ns(start_s),
                end_time=self.record.unix_ns(max(start_s, end_s)),
                instrumentation_scope=SCOPE,
            )
        )
        return span_id


def _known(attributes: Attributes | None) -> dict[str, AttributeValue]:
    return {name: value for name, value in (attributes or {}).items() if value is not None}
