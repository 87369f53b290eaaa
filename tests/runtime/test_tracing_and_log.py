"""Trace context passes from process to process; each log line is written once, as JSON, with its trace."""

import io
import json
import os
import sys
import threading
from collections.abc import Iterator

import pytest
import structlog
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from trunkline_router.record.request_record import RequestRecord
from trunkline_runtime import log
from trunkline_runtime.log import configure_logging, get_logger, log_context
from trunkline_runtime.telemetry.otel_variables import VariableError
from trunkline_runtime.telemetry.otlp_exporter import TRACES, exporter_of
from trunkline_runtime.telemetry.trace_context import trace_context_of
from trunkline_runtime.tracing import configure_tracing, start_span

TRACE_ID, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE_ID}-{CALLER}-01"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """The spans of the test. The process's own provider stays unchanged."""
    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return exporter


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """What is logged, in place of standard error. Restores the configuration for other tests."""
    stream, before = io.StringIO(), structlog.get_config()
    monkeypatch.setattr(log, "_STREAM", stream)
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    yield stream
    structlog.configure(**before)


def test_a_span_is_the_child_of_the_caller(spans: InMemorySpanExporter) -> None:
    start_span("a", traceparent=TRACEPARENT, tracestate="vendor=1", attributes={"k": 1}).end()
    (span,) = spans.get_finished_spans()
    assert span.parent is not None
    assert trace.format_trace_id(span.parent.trace_id) == TRACE_ID
    assert trace.format_span_id(span.parent.span_id) == CALLER
    assert span.attributes == {"k": 1}


@pytest.mark.parametrize("nonsense", ["", "00-xyz", f"00-{'0' * 32}-{CALLER}-01"])
def test_a_trace_context_that_makes_no_sense_starts_a_new_trace(spans: InMemorySpanExporter, nonsense: str) -> None:
    start_span("a", traceparent=nonsense).end()
    assert spans.get_finished_spans()[0].parent is None


@pytest.fixture
def without_exporter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The set-up of a server that exports no spans. The process's own provider stays unchanged."""
    for name in ("OTEL_TRACES_EXPORTER", *(f"OTEL_EXPORTER_OTLP{kind}_ENDPOINT" for kind in ("", "_TRACES"))):
        monkeypatch.delenv(name, raising=False)
    assert configure_tracing("trunkline-worker") is None


@pytest.mark.usefixtures("without_exporter")
@pytest.mark.parametrize("sampled", [False, True])
def test_without_an_exporter_a_span_keeps_nothing_but_its_place_in_the_trace(sampled: bool) -> None:
    span = start_span("a", traceparent=f"00-{TRACE_ID}-{CALLER}-0{sampled:d}", tracestate="vendor=1")
    context = span.get_span_context()
    assert not span.is_recording()
    assert (trace.format_trace_id(context.trace_id), context.trace_flags.sampled) == (TRACE_ID, sampled)


@pytest.mark.usefixtures("without_exporter")
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("name", ["always_on", "always_off", "traceidratio"])
def test_a_worker_follows_the_router_whose_decision_is_made(
    monkeypatch: pytest.MonkeyPatch, name: str, sampled: bool
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", name)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.1")
    configure_tracing("trunkline-worker")
    span = start_span("a", traceparent=f"00-{TRACE_ID}-{CALLER}-0{sampled:d}")
    assert span.get_span_context().trace_flags.sampled == sampled


def test_metadata_without_a_trace_is_no_trace() -> None:
    assert trace_context_of(None) == ("", "")
    assert trace_context_of([("other", "x"), ("traceparent", b"bytes")]) == ("", "")
    assert trace_context_of([("traceparent", TRACEPARENT), ("tracestate", "v=1")]) == (TRACEPARENT, "v=1")


def test_spans_are_exported_only_where_the_variables_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    assert exporter_of(TRACES) is None
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    assert isinstance(exporter_of(TRACES), ConsoleSpanExporter)
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    assert exporter_of(TRACES) is None, "`none` wins"
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "pigeon")
    with pytest.raises(ValueError, match="pigeon is not supported; allowed: otlp, console, none"):
        exporter_of(TRACES)


PROTOCOL, TRACES_PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"


@pytest.fixture
def otlp(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment in which spans are exported to a collector."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    return monkeypatch


@pytest.mark.parametrize("protocol", [None, "", "grpc"])
def test_the_collector_is_spoken_to_over_grpc_unless_told_otherwise(
    otlp: pytest.MonkeyPatch, protocol: str | None
) -> None:
    otlp.setenv("OTEL_TRACES_EXPORTER", "")  # empty counts as unset
    if protocol is not None:
        otlp.setenv(PROTOCOL, protocol)
    exporter = exporter_of(TRACES)
    assert isinstance(exporter, GrpcExporter)
    exporter.shutdown()


@pytest.mark.parametrize("variable", [PROTOCOL, TRACES_PROTOCOL])
def test_http_is_spoken_where_a_variable_says_so(otlp: pytest.MonkeyPatch, variable: str) -> None:
    otlp.setenv(PROTOCOL, "grpc")
    otlp.setenv(variable, "http/protobuf")
    exporter = exporter_of(TRACES)
    assert isinstance(exporter, HttpExporter)
    exporter.shutdown()  # type: ignore[no-untyped-call]


def test_http_without_its_package_is_one_line_that_names_it(otlp: pytest.MonkeyPatch) -> None:
    for name in ("http", "http.trace_exporter"):
        otlp.setitem(sys.modules, f"opentelemetry.exporter.otlp.proto.{name}", None)
    otlp.setenv(PROTOCOL, "http/protobuf")
    with pytest.raises(VariableError) as caught:
        exporter_of(TRACES)
    assert str(caught.value).startswith(
        "OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf needs the package opentelemetry-exporter-otlp-proto-http installed: "
    )
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        (PROTOCOL, "http/json", "OTEL_EXPORTER_OTLP_PROTOCOL=http/json is not supported; allowed: grpc, http/protobuf"),
        (TRACES_PROTOCOL, "tcp", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=tcp is not supported"),
        ("OTEL_TRACES_EXPORTER", "pigeon", "OTEL_TRACES_EXPORTER=pigeon is not supported; allowed: otlp, console"),
        ("OTEL_TRACES_SAMPLER", "often", "OTEL_TRACES_SAMPLER=often is not supported; allowed: always_on, always_off"),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "x", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE=x is not supported; allowed: a number"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "0", "OTEL_BSP_MAX_QUEUE_SIZE=0 is not supported; allowed: a number from 1 to"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon", "the OTLP exporter cannot be made from the OTEL_* variables: "),
    ],
)
def test_a_variable_that_makes_no_sense_is_one_line_and_exit_status_two(
    otlp: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variable: str, value: str, said: str
) -> None:
    otlp.setenv(variable, value)
    with pytest.raises(SystemExit) as caught:
        configure_tracing("trunkline-router")
    assert caught.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"trunkline-router: {said}")
    assert printed.count("\n") == 1


def test_a_line_is_json_once_and_says_whom_it_is_about(printed: io.StringIO) -> None:
    configure_logging("router", router="r-1")
    configure_logging("router", router="r-1")  # a second call must not double the lines
    record = RequestRecord("the-request", 0.0, 0, trace_id=int(TRACE_ID, 16), tenant="acme")
    token = log_context.set(record)
    get_logger().info("an event", tenant="its own")
    log_context.reset(token)
    get_logger().info("another")
    thread = threading.Thread(target=get_logger().info, args=("of a thread",))
    thread.start()
    thread.join()
    line, other, of_thread = map(json.loads, printed.getvalue().splitlines())
    assert (line["service"], line["router"], line["event"]) == ("router", "r-1", "an event")
    assert (line["request_id"], line["trace_id"], line["tenant"]) == ("the-request", TRACE_ID, "its own")
    assert "request_id" not in other
    assert (of_thread["service"], of_thread["router"]) == ("router", "r-1")


@pytest.mark.parametrize(("value", "written"), [(1 << 70, 1 << 70), ("a\ud800", "a\ud800"), (b"x", "b'x'")], ids=repr)
def test_a_value_of_any_kind_can_be_logged(printed: io.StringIO, value: object, written: object) -> None:
    configure_logging("router")
    get_logger().info("an event", value=value)
    assert json.loads(printed.getvalue())["value"] == written


def raise_with(secret: str) -> None:
    try:
        raise KeyError(secret)
    except KeyError as error:
        raise ExceptionGroup(secret, [OSError(2, secret), ValueError(secret)]) from error


def test_an_error_is_logged_with_types_and_places_and_without_messages_that_may_quote_a_prompt(
    printed: io.StringIO,
) -> None:
    configure_logging("router")
    secret = "the text of " + "a prompt"
    try:
        raise_with(secret)
    except ExceptionGroup as error:
        get_logger().error("unexpected error", exc_info=error)
    assert secret not in printed.getvalue()
    stack = json.loads(printed.getvalue())["exception"]
    for part in ("builtins.KeyError", "[errno 2]", "builtins.ValueError", "builtins.ExceptionGroup", "in raise_with"):
        assert part in stack
    assert stack.index("KeyError") < stack.index("ExceptionGroup"), "causes come first"
