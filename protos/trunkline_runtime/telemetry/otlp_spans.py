"""Writes spans as an OTLP message, in less than half the time that the library takes: most attributes of a span
are the same in all requests, and their bytes are kept.

https://github.com/open-telemetry/opentelemetry-proto/blob/main/opentelemetry/proto/trace/v1/trace.proto; the wire
format: https://protobuf.dev/programming-guides/encoding
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from struct import Struct

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status

from trunkline_runtime.wire import varint_bytes

MOST_KEPT = 4096  # attributes, and as many keys
MOST_KEPT_CHARACTERS, MOST_KEPT_INT = 64, 127  # of values that are kept
LEAST_INT, MOST_INT = -(1 << 63), (1 << 63) - 1
KNOWS_IF_REMOTE, IS_REMOTE = 0x100, 0x200

_UINT64 = (1 << 64) - 1
_fixed64, _fixed32, _double = Struct("<Q").pack, Struct("<I").pack, Struct("<d").pack
_times = Struct("<cQcQ").pack  # two fields: each a tag, and nanoseconds since 1970
_SIZES = [varint_bytes(size) for size in range(128)]


def encode_spans(spans: Sequence[ReadableSpan]) -> ExportTraceServiceRequest:
    """The message for these spans, by resource and scope."""
    groups: dict[tuple[int, int], list[ReadableSpan]] = {}
    for span in spans:
        groups.setdefault((id(span.resource), id(span.instrumentation_scope)), []).append(span)
    written = (b"\x0a" + _sized(_of_resource(group)) for group in groups.values())
    return ExportTraceServiceRequest.FromString(b"".join(written))


def _of_resource(spans: Sequence[ReadableSpan]) -> bytes:
    """ResourceSpans with the spans of one scope."""
    resource, scope = spans[0].resource, spans[0].instrumentation_scope
    scoped = b"\x0a" + _sized(_scope(scope) if scope is not None else b"")
    scoped += b"".join([b"\x12" + _sized(_span(span)) for span in spans])
    scoped += _text(b"\x1a", scope.schema_url if scope is not None else None)
    return b"".join(
        (b"\x0a", _sized(_resource(resource)), b"\x12", _sized(scoped), _text(b"\x1a", resource.schema_url))
    )


def _resource(resource: Resource) -> bytes:
    return _attributes(b"\x0a", resource.attributes)


def _scope(scope: InstrumentationScope) -> bytes:
    return _text(b"\x0a", scope.name) + _text(b"\x12", scope.version) + _attributes(b"\x1a", scope.attributes)


def _span(span: ReadableSpan) -> bytes:
    context = span.get_span_context()
    assert context is not None
    parent, state = span.parent, context.trace_state
    parts = [
        _ids(context),
        b"" if parent is None else b"\x22\x08" + parent.span_id.to_bytes(8),
        _start_of(span.name, span.kind),
        _times(b"\x39", span.start_time or 0, b"\x41", span.end_time or 0),
        _attributes(b"\x4a", span.attributes),
        b"\x7a" + _sized(_status(span.status)) + b"\x85\x01" + _fixed32(_flags(parent)),
    ]
    if state:
        parts.append(_text(b"\x1a", ",".join(f"{key}={value}" for key, value in state.items())))
    parts += [b"\x5a" + _sized(_event(event)) for event in span.events]
    parts += [b"\x6a" + _sized(_link(link)) for link in span.links]
    dropped = ((b"\x50", span.dropped_attributes), (b"\x60", span.dropped_events), (b"\x70", span.dropped_links))
    parts += [_count(tag, count) for tag, count in dropped if count]
    return b"".join(parts)


@lru_cache(MOST_KEPT)
def _start_of(name: str, kind: SpanKind) -> bytes:
    return _text(b"\x2a", name) + b"\x30" + varint_bytes(kind.value + 1)


def _event(event: Event) -> bytes:
    attributes, dropped = _attributes(b"\x1a", event.attributes), _count(b"\x20", event.dropped_attributes)
    return b"\x09" + _fixed64(event.timestamp) + _text(b"\x12", event.name) + attributes + dropped


def _link(link: Link) -> bytes:
    attributes, dropped = _attributes(b"\x22", link.attributes), _count(b"\x28", link.dropped_attributes)
    return _ids(link.context) + attributes + dropped + b"\x35" + _fixed32(_flags(link.context))


def _status(status: Status) -> bytes:
    return _text(b"\x12", status.description) + _count(b"\x18", status.status_code.value)


def _ids(context: SpanContext) -> bytes:
    return b"\x0a\x10" + context.trace_id.to_bytes(16) + b"\x12\x08" + context.span_id.to_bytes(8)


def _flags(context: SpanContext | None) -> int:
    return KNOWS_IF_REMOTE | (IS_REMOTE if context is not None and context.is_remote else 0)


def _text(tag: bytes, text: str | None) -> bytes:
    return tag + _sized(_utf8(text)) if text else b""


def _count(tag: bytes, count: int) -> bytes:
    return tag + varint_bytes(count) if count else b""


def _attributes(tag: bytes, attributes: Mapping[str, object] | None) -> bytes:
    """The attributes, each as a field with this tag. What OTLP cannot hold is left out."""
    if not attributes:
        return b""
    written = []
    for key, value in attributes.items():
        kind = type(value)
        if kind is float:
            written.append(_before_double(key) + _double(value))
        elif (kind is str and len(value) <= MOST_KEPT_CHARACTERS) or (kind is int and 0 <= value <= MOST_KEPT_INT):  # type: ignore[arg-type,operator]  # the type is checked by identity
            written.append(_kept(key, value))
        elif (encoded := _value(value)) is not None:
            written.append(_sized(_key(key) + b"\x12" + _sized(encoded)))
    return tag + tag.join(written) if written else b""


@lru_cache(MOST_KEPT, typed=True)
def _kept(key: str, value: object) -> bytes:
    """An attribute."""
    encoded = _value(value)
    assert encoded is not None
    return _sized(_key(key) + b"\x12" + _sized(encoded))


@lru_cache(MOST_KEPT)
def _before_double(key: str) -> bytes:
    """An attribute whose value is a double, as far as that: eight more bytes follow."""
    start = _key(key) + b"\x12\x09\x21"
    return varint_bytes(len(start) + 8) + start


@lru_cache(MOST_KEPT)
def _key(key: str) -> bytes:
    return b"\x0a" + _sized(_utf8(key))


def _value(value: object) -> bytes | None:
    """An AnyValue; None if there is none for this value."""
    if isinstance(value, float):
        return b"\x21" + _double(value)
    if isinstance(value, bool):
        return b"\x10\x01" if value else b"\x10\x00"
    if isinstance(value, int):
        return b"\x18" + varint_bytes(value & _UINT64) if LEAST_INT <= value <= MOST_INT else None
    if isinstance(value, str):
        return b"\x0a" + _sized(_utf8(value))
    if isinstance(value, bytes):
        return b"\x3a" + _sized(value)
    if isinstance(value, Sequence):
        parts = [part for each in value if (part := _value(each)) is not None]
        return b"\x2a" + _sized(b"".join([b"\x0a" + _sized(part) for part in parts]))
    return None


def _utf8(text: str) -> bytes:
    return text.encode(errors="replace")


def _sized(raw: bytes) -> bytes:
    size = len(raw)
    return (_SIZES[size] if size < len(_SIZES) else varint_bytes(size)) + raw
