"""Makes the spans of one trace from times on the router's clock."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState
from opentelemetry.util.types import AttributeValue

from trunkline_router.telemetry.request_record import RequestRecord
from trunkline_runtime.telemetry.trace_context import new_span_id

# Of RPC and HTTP: the conventions for generative AI have no schema yet.
SCOPE = InstrumentationScope("trunkline", schema_url="https://opentelemetry.io/schemas/1.44.0")
UNSET = Status(StatusCode.UNSET)


@dataclass(slots=True)
class TraceBuilder:
    """The spans of a request so far. Spans and events that would end before they begin last no time."""

    record: RequestRecord
    resource: Resource
    spans: list[ReadableSpan] = field(default_factory=list)
    _state: TraceState | None = None

    def __post_init__(self) -> None:
        if self.record.tracestate:
            self._state = TraceState.from_header([self.record.tracestate])

    def unix_ns(self, time_s: float) -> int:
        """A time on the router's clock as nanoseconds since 1970."""
        return self.record.unix_ns(time_s)

    def event(self, name: str, time_s: float, attributes: Mapping[str, AttributeValue]) -> Event:
        return Event(name, attributes, self.unix_ns(time_s))

    def link(self, span_id: int) -> Link:
        return Link(self._context(span_id))

    def add(
        self,
        name: str,
        parent_id: int,
        start_s: float,
        end_s: float,
        attributes: Mapping[str, AttributeValue],
        *,
        span_id: int | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        events: Iterable[Event] = (),
        links: Iterable[Link] = (),
        status: Status = UNSET,
        is_parent_remote: bool = False,
    ) -> int:
        """Adds a span; returns its id. `parent_id`: 0 for none."""
        made = span_id or new_span_id()
        start_ns = self.unix_ns(start_s)
        self.spans.append(
            ReadableSpan(
                name,
                context=self._context(made),
                parent=self._context(parent_id, is_remote=is_parent_remote) if parent_id else None,
                resource=self.resource,
                attributes=attributes,
                events=tuple(events),
                links=tuple(links),
                kind=kind,
                status=status,
                start_time=start_ns,
                end_time=max(start_ns, self.unix_ns(end_s)),
                instrumentation_scope=SCOPE,
            )
        )
        return made

    def _context(self, span_id: int, *, is_remote: bool = False) -> SpanContext:
        return SpanContext(self.record.trace_id, span_id, is_remote, TraceFlags(TraceFlags.SAMPLED), self._state)
