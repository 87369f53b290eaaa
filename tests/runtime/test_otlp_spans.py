"""Spans are written as the library's own encoder writes them."""

import io
import json
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans as library_encode_spans
from opentelemetry.exporter.otlp.proto.grpc.exporter import OTLPExporterMixin
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from tests.runtime.otlp_receiver import GRPC, HTTP, attributes_of, receiving
from trunkline_runtime.telemetry.console_span_transport import ConsoleSpanTransport
from trunkline_runtime.telemetry.otlp_exporter import TRACES, ExporterError, otlp_exporter
from trunkline_runtime.telemetry.otlp_spans import SpanSource, TraceWriter, event, link, sdk_span, unique_attribute
from trunkline_runtime.telemetry.otlp_values import MOST_KEPT_CHARACTERS

RESOURCE = Resource({"service.name": "router", "n": 3}, "https://example.org/schema")
SCOPE = InstrumentationScope("trunkline", "1.2", "https://example.org/scope", {"a": True})
VALUES: list[Any] = [
    *("", "a", "ü€😀", "x" * MOST_KEPT_CHARACTERS, "y" * 300),
    *(True, False, 0, 1, -1, 127, 128, (1 << 63) - 1, -(1 << 63), 0.0, -0.5, 1e300, float("inf")),
    *((), ("stop", "length"), (1, 2), (True,), (0.5, 1.5)),
    *(b"", b"\x00\xff", HTTPStatus.NOT_FOUND),
]


def context(span_id: int, *, is_remote: bool = False, state: TraceState | None = None) -> SpanContext:
    return SpanContext((1 << 127) + 5, span_id, is_remote, TraceFlags(TraceFlags.SAMPLED), state)


def span(
    attributes: dict[str, Any] | None = None,
    *,
    parent: SpanContext | None = None,
    kind: SpanKind = SpanKind.INTERNAL,
    events: Sequence[Event] = (),
    links: Sequence[Link] = (),
    status: Status | None = None,
    state: TraceState | None = None,
) -> ReadableSpan:
    return ReadableSpan(
        "router.generate",
        context=context(7, state=state),
        parent=parent,
        resource=RESOURCE,
        attributes=attributes,
        events=events,
        links=links,
        kind=kind,
        status=status or Status(StatusCode.UNSET),
        start_time=1_800_000_000_000_000_000,
        end_time=1_800_000_000_500_000_000,
        instrumentation_scope=SCOPE,
    )


def request_of(*spans: ReadableSpan, resource: Resource = RESOURCE, scope: InstrumentationScope = SCOPE) -> bytes:
    return SpanSource(resource, scope).request([sdk_span(each) for each in spans])


def check(*spans: ReadableSpan) -> None:
    for _ in range(2):  # at first, and from what is kept
        assert ExportTraceServiceRequest.FromString(request_of(*spans)) == library_encode_spans(spans)


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_every_value_of_an_attribute_is_written(value: Any) -> None:
    check(span({"key": value, "k" * 200: value}, events=[Event("event", {"key": value}, 5)]))


def test_equal_values_of_several_types_stay_apart() -> None:
    check(*(span({"key": value}) for value in (1, True, 1.0, "1", "True")))


@pytest.mark.parametrize("kind", SpanKind)
@pytest.mark.parametrize("is_remote", [False, True])
def test_kinds_parents_and_states_are_written(kind: SpanKind, is_remote: bool) -> None:
    state = TraceState.from_header(["a=1,b=2"])
    check(span(kind=kind, parent=context(9, is_remote=is_remote), state=state))


def test_events_links_and_errors_are_written() -> None:
    links = [Link(context(3, is_remote=True)), Link(context(4), {"key": "value"})]
    events = [Event("first token", {}, 1), Event("gap", None, 1 << 62)]
    check(span(events=events, links=links, status=Status(StatusCode.ERROR, "NO_WORKER")))
    check(span(status=Status(StatusCode.OK)))


def test_a_batch_of_large_spans_is_written() -> None:
    check(*(span({f"key {n}": "z" * n for n in range(300)}) for _ in range(20)))


def test_a_source_without_anything_but_its_names_is_written() -> None:
    plain = SpanSource(Resource({}), InstrumentationScope("trunkline")).request([])
    (resource,) = ExportTraceServiceRequest.FromString(plain).resource_spans
    (scope,) = resource.scope_spans
    assert (list(resource.resource.attributes), resource.schema_url) == ([], "")
    assert (scope.scope.name, scope.scope.version, scope.schema_url, list(scope.spans)) == ("trunkline", "", "", [])


@pytest.mark.parametrize("value", [1 << 63, -(1 << 63) - 1, object()], ids=["too large", "too small", "no number"])
def test_what_otlp_cannot_hold_is_left_out(value: Any) -> None:
    assert request_of(span({"seed": value, "key": 1})) == request_of(span({"key": 1}))


def test_text_that_is_not_unicode_does_not_lose_the_span() -> None:
    assert request_of(span({"key": "a\ud800"})) == request_of(span({"key": "a?"}))


def test_a_span_is_written_from_its_parts() -> None:
    fields = (unique_attribute("id", "x" * 300), event("gap", 5, {"a": 1}, dropped=2), link(9, 10, {"b": 2}, 3))
    written = TraceWriter(1 << 127, "a=1").span("route", 7, 8, 100, 200, fields, is_parent_remote=True)
    read = Span.FromString(written)
    assert (read.name, read.trace_state, read.kind) == ("route", "a=1", Span.SPAN_KIND_INTERNAL)
    assert (read.trace_id, read.span_id) == ((1 << 127).to_bytes(16), (7).to_bytes(8))
    assert (read.parent_span_id, read.flags) == ((8).to_bytes(8), 0x300)
    assert (read.start_time_unix_nano, read.end_time_unix_nano) == (100, 200)
    assert attributes_of(read.attributes) == {"id": "x" * 300}
    assert [(each.name, each.time_unix_nano, each.dropped_attributes_count) for each in read.events] == [("gap", 5, 2)]
    (linked,) = read.links
    assert (linked.trace_id, linked.span_id) == ((9).to_bytes(16), (10).to_bytes(8))
    assert (attributes_of(linked.attributes), linked.dropped_attributes_count, linked.flags) == ({"b": 2}, 3, 0x100)


@pytest.mark.parametrize("protocol", [GRPC, HTTP])
@pytest.mark.parametrize("options", [{}, {"OTEL_EXPORTER_OTLP_COMPRESSION": "gzip"}], ids=str)
def test_the_librarys_exporters_send_what_is_written(
    monkeypatch: pytest.MonkeyPatch, protocol: str, options: dict[str, str]
) -> None:
    with receiving() as receiver:
        for name, value in (receiver.environment(protocol) | options).items():
            monkeypatch.setenv(name, value)
        transport = otlp_exporter(TRACES)
        assert transport.send(request_of(span({"key": "value"})), 1) is True
        transport.shutdown()
        assert transport.send(request_of(span()), 1) is False
    (got,) = receiver.spans
    assert (got.service, got.name, got.attributes) == ("router", "router.generate", {"key": "value"})


def without_a_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(OTLPExporterMixin, "_initialize_channel_and_stub")


def without_a_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HttpExporter, "_client", property(lambda _: None, lambda *_: None), raising=False)


@pytest.mark.parametrize(("protocol", "change"), [(GRPC, without_a_hook), (HTTP, without_a_client)])
def test_another_version_of_the_library_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, protocol: str, change: Callable[[pytest.MonkeyPatch], None]
) -> None:
    change(monkeypatch)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    with pytest.raises(ExporterError, match=r"^opentelemetry-exporter-otlp-proto-(grpc|http) is not a supported "):
        otlp_exporter(TRACES)


def test_the_console_gets_a_line_of_otlps_json_for_each_batch() -> None:
    out = io.StringIO()
    transport = ConsoleSpanTransport(out)
    parent, links = context(9, is_remote=True), [Link(context(3))]
    assert transport.send(request_of(span({"key": "value"}, parent=parent, links=links, kind=SpanKind.SERVER)), 1)
    assert transport.send(request_of(span(), span()), 2)
    assert transport.send(request_of(), 0)
    transport.shutdown()
    first, second, third = map(json.loads, out.getvalue().splitlines())
    (written,) = first["resourceSpans"][0]["scopeSpans"][0]["spans"]
    assert (written["name"], written["kind"]) == ("router.generate", 2)
    assert written["attributes"] == [{"key": "key", "value": {"stringValue": "value"}}]
    assert written["traceId"] == written["links"][0]["traceId"] == f"{(1 << 127) + 5:032x}"
    assert (written["spanId"], written["parentSpanId"]) == (f"{7:016x}", f"{9:016x}")
    assert written["links"][0]["spanId"] == f"{3:016x}"
    assert len(second["resourceSpans"][0]["scopeSpans"][0]["spans"]) == 2
    assert "spans" not in third["resourceSpans"][0]["scopeSpans"][0]
