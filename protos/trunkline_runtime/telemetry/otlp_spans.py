"""Writes spans as bytes of OTLP, without an object for each span, event and attribute: that would be most of what a
traced request costs a router.

https://github.com/open-telemetry/opentelemetry-proto/blob/main/opentelemetry/proto/trace/v1/trace.proto
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from struct import Struct

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanKind, StatusCode

from trunkline_runtime.telemetry.otlp_values import attributes, count, sized, text, unique
from trunkline_runtime.wire import varint_bytes

MOST_KEPT = 1024  # parts of spans, and as many states
KNOWS_IF_REMOTE, IS_REMOTE = 0x100, 0x200

_fixed32, _time = Struct("<I").pack, Struct("<Q").pack
_times = Struct("<cQcQ").pack  # two fields: each a tag, and nanoseconds since 1970


@lru_cache(MOST_KEPT)
def status(code: StatusCode, description: str | None = None) -> bytes:
    """How a span ended."""
    return b"\x7a" + sized(text(b"\x12", description) + count(b"\x18", code.value))


UNSET = status(StatusCode.UNSET)


class SpanSource:
    """Where spans come from: the same for all spans of a process."""

    def __init__(self, resource: Resource, scope: InstrumentationScope) -> None:
        named = text(b"\x0a", scope.name) + text(b"\x12", scope.version) + attributes(b"\x1a", scope.attributes)
        self._before = b"\x0a" + sized(attributes(b"\x0a", resource.attributes))
        self._after = text(b"\x1a", resource.schema_url)
        self._scope_before = b"\x0a" + sized(named)
        self._scope_after = text(b"\x1a", scope.schema_url)

    def request(self, spans: Sequence[bytes]) -> bytes:
        """An ExportTraceServiceRequest with spans that a TraceWriter or sdk_span() wrote."""
        scoped = b"".join((self._scope_before, *[b"\x12" + sized(span) for span in spans], self._scope_after))
        return b"\x0a" + sized(b"".join((self._before, b"\x12", sized(scoped), self._after)))


class TraceWriter:
    """Writes the spans of one trace.  state: its W3C trace state"""

    __slots__ = ("_before",)

    def __init__(self, trace_id: int, state: str = "") -> None:
        self._before = text(b"\x1a", state) + b"\x0a\x10" + trace_id.to_bytes(16)

    def span(
        self,
        name: str,
        span_id: int,
        parent_id: int,
        start_ns: int,
        end_ns: int,
        fields: Iterable[bytes] = (),
        kind: SpanKind = SpanKind.INTERNAL,
        status: bytes = UNSET,
        *,
        is_parent_remote: bool = False,
    ) -> bytes:
        """A span.

        parent_id: 0 for none
        start_ns, end_ns: since 1970
        fields: by span_attributes(), unique_attribute(), event() and link(), in any order
        status: by status()
        """
        parent = b"\x22\x08" + parent_id.to_bytes(8) if parent_id else b""
        repeated = _repeated(name, kind, status, bool(parent_id) and is_parent_remote)
        times = _times(b"\x39", start_ns, b"\x41", end_ns)
        return b"".join((self._before, b"\x12\x08", span_id.to_bytes(8), parent, times, repeated, *fields))


def span_attributes(values: Mapping[str, object] | None) -> bytes:
    """The attributes of a span. What OTLP cannot hold is left out."""
    return attributes(b"\x4a", values)


def unique_attribute(key: str, value: str) -> bytes:
    """An attribute of a span whose text no other span has, or few."""
    return unique(b"\x4a", key, value)


def event(name: str, unix_ns: int, values: Mapping[str, object] | None = None, *, dropped: int = 0) -> bytes:
    """An event of a span.  dropped: how many attributes it lacks"""
    told = attributes(b"\x1a", values) + count(b"\x20", dropped)
    return b"\x5a" + sized(b"\x09" + _time(unix_ns) + text(b"\x12", name) + told)


def link(
    trace_id: int,
    span_id: int,
    values: Mapping[str, object] | None = None,
    dropped: int = 0,
    *,
    is_remote: bool = False,
) -> bytes:
    """A link to another span.  dropped: how many attributes it lacks"""
    ids = b"\x0a\x10" + trace_id.to_bytes(16) + b"\x12\x08" + span_id.to_bytes(8)
    told = attributes(b"\x22", values) + count(b"\x28", dropped)
    return b"\x6a" + sized(ids + told + b"\x35" + _flags(is_remote))


def sdk_span(of_sdk: ReadableSpan) -> bytes:
    """A span that the SDK made. Its resource and scope are those of the source: the process makes no others."""
    context, parent = of_sdk.get_span_context(), of_sdk.parent
    assert context is not None
    fields = [span_attributes(of_sdk.attributes)]
    for each in of_sdk.events:
        fields.append(event(each.name, each.timestamp, each.attributes, dropped=each.dropped_attributes))
    for other in of_sdk.links:
        to = other.context
        fields.append(link(to.trace_id, to.span_id, other.attributes, other.dropped_attributes, is_remote=to.is_remote))
    dropped = ((b"\x50", of_sdk.dropped_attributes), (b"\x60", of_sdk.dropped_events), (b"\x70", of_sdk.dropped_links))
    fields += [count(tag, number) for tag, number in dropped]
    return TraceWriter(context.trace_id, context.trace_state.to_header()).span(
        of_sdk.name,
        context.span_id,
        0 if parent is None else parent.span_id,
        of_sdk.start_time or 0,
        of_sdk.end_time or 0,
        fields,
        of_sdk.kind,
        status(of_sdk.status.status_code, of_sdk.status.description),
        is_parent_remote=parent is not None and parent.is_remote,
    )


@lru_cache(MOST_KEPT)
def _repeated(name: str, kind: SpanKind, status: bytes, is_parent_remote: bool) -> bytes:
    """What many spans share."""
    return (
        text(b"\x2a", name) + b"\x30" + varint_bytes(kind.value + 1) + status + b"\x85\x01" + _flags(is_parent_remote)
    )


def _flags(is_remote: bool) -> bytes:
    return _fixed32(KNOWS_IF_REMOTE | (IS_REMOTE if is_remote else 0))
