"""An OpenTelemetry collector: a real gRPC server that keeps what is exported to it."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

EXPORT_INTERVAL_MS = 200


class Collector(trace_service_pb2_grpc.TraceServiceServicer, metrics_service_pb2_grpc.MetricsServiceServicer):
    """Spans and metrics, as text."""

    def __init__(self) -> None:
        self.port = 0
        self._lock = threading.Lock()
        self._told: dict[str, list[str]] = {"spans": [], "metrics": []}

    def text(self, kind: str) -> str:
        """All exported "spans" or "metrics"."""
        with self._lock:
            return "\n".join(self._told[kind])

    def environment(self) -> dict[str, str]:
        """Variables with which a process exports everything here."""
        return {
            "OTEL_TRACES_EXPORTER": "otlp",
            "OTEL_METRICS_EXPORTER": "otlp",
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self.port}",
            "OTEL_METRIC_EXPORT_INTERVAL": str(EXPORT_INTERVAL_MS),
            "OTEL_BSP_SCHEDULE_DELAY": str(EXPORT_INTERVAL_MS),
        }

    def Export(self, request: Any, _: Any) -> Any:
        """Takes an export of either service."""
        is_trace = isinstance(request, trace_service_pb2.ExportTraceServiceRequest)
        with self._lock:
            self._told["spans" if is_trace else "metrics"].append(str(request))
        if is_trace:
            return trace_service_pb2.ExportTraceServiceResponse()
        return metrics_service_pb2.ExportMetricsServiceResponse()


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    add_traces: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server  # without types
    add_metrics: Any = metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server
    add_traces(collector, server)
    add_metrics(collector, server)
    collector.port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()
