"""Spans are written as the library's own encoder writes them."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any

import grpc
import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans as library_encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from trunkline_runtime.telemetry import grpc_span_exporter
from trunkline_runtime.telemetry.otlp_exporter import TRACES, otlp_exporter
from trunkline_runtime.telemetry.otlp_spans import MOST_KEPT_CHARACTERS, encode_spans

SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"
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
    resource: Resource = RESOURCE,
    scope: InstrumentationScope | None = SCOPE,
    state: TraceState | None = None,
) -> ReadableSpan:
    return ReadableSpan(
        "router.generate",
        context=context(7, state=state),
        parent=parent,
        resource=resource,
        attributes=attributes,
        events=events,
        links=links,
        kind=kind,
        status=status or Status(StatusCode.UNSET),
        start_time=1_800_000_000_000_000_000,
        end_time=1_800_000_000_500_000_000,
        instrumentation_scope=scope,
    )


def check(*spans: ReadableSpan) -> None:
    for _ in range(2):  # at first, and from what is kept
        assert encode_spans(spans) == library_encode_spans(spans)


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


def test_spans_are_grouped_by_resource_and_scope() -> None:
    other = Resource({"service.name": "worker"})
    check(span(), span(resource=other), span())
    check(span(scope=None), span(scope=None))
    check()


def test_a_batch_of_large_spans_is_written() -> None:
    check(*(span({f"key {n}": "z" * n for n in range(300)}) for _ in range(20)))


@pytest.mark.parametrize("value", [1 << 63, -(1 << 63) - 1, object()], ids=repr)
def test_what_otlp_cannot_hold_is_left_out(value: Any) -> None:
    assert encode_spans([span({"seed": value, "key": 1})]) == library_encode_spans([span({"key": 1})])


def test_text_that_is_not_unicode_does_not_lose_the_span() -> None:
    assert encode_spans([span({"key": "a\ud800"})]) == library_encode_spans([span({"key": "a?"})])


def test_the_exporter_of_the_default_protocol_sends_what_it_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    sent: list[bytes] = []

    def export(message: bytes, context: grpc.ServicerContext) -> bytes:
        sent.append(message)
        return b""

    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(export)
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Export": handler}),))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    server.start()
    written: list[Sequence[ReadableSpan]] = []

    def noted(spans: Sequence[ReadableSpan]) -> ExportTraceServiceRequest:
        written.append(spans)
        return encode_spans(spans)

    monkeypatch.setattr(grpc_span_exporter, "encode_spans", noted)
    exporter = otlp_exporter(TRACES)
    spans = [span({"key": "value"})]
    try:
        assert exporter.export(spans) is SpanExportResult.SUCCESS
    finally:
        exporter.shutdown()
        server.stop(0).wait()
    assert written == [spans]
    assert [ExportTraceServiceRequest.FromString(message) for message in sent] == [library_encode_spans(spans)]
