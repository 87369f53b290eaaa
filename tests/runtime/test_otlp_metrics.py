"""The metrics of a process are exported over OTLP if the standard variables ask for it."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Queue
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from prometheus_client.core import Metric

from trunkline_runtime.telemetry.exposition import Families
from trunkline_runtime.telemetry.otlp_exporter import METRICS, is_exported
from trunkline_runtime.telemetry.otlp_metrics import MetricsExport, metrics_export
from trunkline_runtime.telemetry.series import BucketCounts, counter, gauge, histogram

PATIENCE_S = 60.0
SERVICE = "trunkline-router"
TRACE_ID, UNIX_S = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 1_800_000_000.5
Request = metrics_service_pb2.ExportMetricsServiceRequest


def families() -> Iterator[Metric]:
    counts = BucketCounts((0.1, 1.0))
    for value in (0.05, 0.5):
        counts.add(value)
    counts.add_traced(0.5, TRACE_ID, UNIX_S)
    counts.add_traced(7.0, 0, UNIX_S)  # of a request whose trace is not exported
    yield counter("trunkline_router_requests", "Requests.", ("lane",), [(("batch",), 3.0), (("standard",), 4.0)])
    yield gauge("trunkline_router_unread_bytes", "Unread.", (), [((), 5.0)])
    labels = ("gen_ai_operation_name", "error_type", "server")  # an empty label is none
    yield histogram("gen_ai_server_request_duration_seconds", "Time.", labels, [(("chat", "INTERNAL", ""), counts)])


async def collect() -> Families:
    return families()


def export_of(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> MetricsExport:
    for name, value in {"OTEL_METRICS_EXPORTER": "otlp", **environment}.items():
        monkeypatch.setenv(name, value)
    export = metrics_export(SERVICE, "router-1", collect)
    assert export is not None
    return export


class Servicer(metrics_service_pb2_grpc.MetricsServiceServicer):
    def __init__(self, received: "Queue[Any]") -> None:
        self._received = received

    def Export(self, request: Any, _: Any) -> Any:
        self._received.put(request)
        return metrics_service_pb2.ExportMetricsServiceResponse()


@contextmanager
def over_grpc(received: "Queue[Any]") -> Iterator[dict[str, str]]:
    """A collector, and the variables that name it."""
    server = grpc.server(ThreadPoolExecutor(1))
    add: Any = metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server  # without types
    add(Servicer(received), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": f"http://127.0.0.1:{port}"}
    finally:
        server.stop(None).wait()


@contextmanager
def over_http(received: "Queue[Any]") -> Iterator[dict[str, str]]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.put(Request.FromString(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        }
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("collector", [over_grpc, over_http])
async def test_every_family_reaches_a_collector(collector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    received: Queue[Any] = Queue()
    with collector(received) as environment:
        export = export_of(environment, monkeypatch)
        await export.export()
        request = received.get(timeout=PATIENCE_S)
        await export.close()
        assert not received.empty(), "what was counted since the last export is exported when the process stops"
    (resource,) = request.resource_metrics
    told = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
    assert (told["service.name"], told["service.instance.id"]) == (SERVICE, "router-1")
    metrics = {metric.name: metric for metric in resource.scope_metrics[0].metrics}
    requests = metrics["trunkline_router_requests"].sum
    assert (requests.is_monotonic, [point.as_double for point in requests.data_points]) == (True, [3.0, 4.0])
    assert requests.data_points[0].start_time_unix_nano < requests.data_points[0].time_unix_nano
    unread = metrics["trunkline_router_unread_bytes"]
    assert (unread.unit, unread.gauge.data_points[0].as_double) == ("By", 5.0)
    duration = metrics["gen_ai.server.request.duration"]
    (point,) = duration.histogram.data_points
    assert (duration.unit, list(point.bucket_counts), list(point.explicit_bounds)) == ("s", [1, 2, 1], [0.1, 1.0])
    attributes = {"gen_ai.operation.name": "chat", "error.type": "INTERNAL"}
    assert (point.count, point.sum, point.HasField("min")) == (4, pytest.approx(8.05), False)
    assert {pair.key: pair.value.string_value for pair in point.attributes} == attributes
    (example,) = point.exemplars
    assert (int.from_bytes(example.trace_id), example.as_double) == (TRACE_ID, 0.5)
    assert (example.time_unix_nano, any(example.span_id)) == (int(UNIX_S * 1e9), False)


async def test_it_exports_at_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    received: Queue[Any] = Queue()
    with over_grpc(received) as environment:
        export = export_of({**environment, "OTEL_METRIC_EXPORT_INTERVAL": "10"}, monkeypatch)
        async with export.running():
            for _ in range(3):
                await asyncio.to_thread(received.get, timeout=PATIENCE_S)


async def test_an_error_in_an_export_does_not_end_the_exports(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    received: Queue[Any] = Queue()
    with over_grpc(received) as environment:
        export = export_of({**environment, "OTEL_METRIC_EXPORT_INTERVAL": "10"}, monkeypatch)
        works, calls = export._collect, 0

        async def fail_once() -> Families:
            nonlocal calls
            calls += 1
            if calls == 1:
                raise RuntimeError("a bug")
            return await works()

        monkeypatch.setattr(export, "_collect", fail_once)
        async with export.running():
            await asyncio.to_thread(received.get, timeout=PATIENCE_S)
    assert "unexpected error in an export of metrics" in capfd.readouterr().out


async def test_a_collector_that_is_silent_costs_a_line_and_delays_nobody(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        export = export_of({**endpoint, "OTEL_EXPORTER_OTLP_METRICS_TIMEOUT": "0.3"}, monkeypatch)
        exporting = asyncio.create_task(export.export())
        turns = 0
        while not exporting.done():
            turns += 1
            await asyncio.sleep(0.01)  # the event loop goes on
        assert turns > 1
        await export.export()
        await export.close()
    lines = capfd.readouterr()
    told = [line for line in (lines.out + lines.err).splitlines() if line]
    assert len(told) == 1
    assert "metrics are not exported" in told[0]


def test_nothing_is_exported_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_METRICS_EXPORTER", raising=False)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", raising=False)
    assert metrics_export(SERVICE, "router-1", collect) is None
    for name in ("otlp", "console"):
        monkeypatch.setenv("OTEL_METRICS_EXPORTER", name)
        assert is_exported(METRICS)
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert metrics_export(SERVICE, "router-1", collect) is None


@pytest.mark.parametrize(
    ("variable", "value", "allowed"),
    [
        ("OTEL_METRICS_EXPORTER", "carrier-pigeon", "otlp, console, none"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "-5", "a number from 1 to 86400000"),
        ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "http/json", "grpc, http/protobuf"),
    ],
)
def test_an_invalid_variable_is_refused_in_one_line(
    variable: str, value: str, allowed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "otlp")
    monkeypatch.setenv(variable, value)
    with pytest.raises(SystemExit) as ended:
        metrics_export(SERVICE, "router-1", collect)
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"{SERVICE}: {variable}={value} is not supported; allowed: {allowed}\n"
