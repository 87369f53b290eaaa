"""Makes the transport of spans that the standard OTEL_* variables ask for."""

import os
import sys
from typing import Protocol, TextIO

from google.protobuf.json_format import MessageToJson
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from trunkline_runtime.telemetry.otlp_exporter import TRACES, ExporterError, otlp_exporter

EXPORTER, DISABLED = "OTEL_TRACES_EXPORTER", "OTEL_SDK_DISABLED"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
EXPORTERS = ("otlp", "console", "none")


class SpanTransport(Protocol):
    """Takes spans to where the variables say."""

    def send(self, request: bytes, num_spans: int) -> bool:
        """Sends an ExportTraceServiceRequest with so many spans. Returns whether it has arrived."""
        ...

    def shutdown(self) -> None:
        """Ends a send() that still waits. No other one follows."""
        ...


class ConsoleTransport:
    """Prints each request as a line of OTLP's JSON."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout

    def send(self, request: bytes, _: int) -> bool:
        """See SpanTransport."""
        message = ExportTraceServiceRequest.FromString(request)
        print(MessageToJson(message, indent=None), file=self._out, flush=True)
        return True

    def shutdown(self) -> None:
        """See SpanTransport."""


def span_transport() -> SpanTransport | None:
    """The transport that the variables ask for; None if there is none. Raises ExporterError."""
    wanted = os.environ.get(EXPORTER)  # an empty variable counts as unset, by OpenTelemetry's rules
    if not wanted:
        wanted = "otlp" if any(os.environ.get(name) for name in ENDPOINTS) else "none"
    if wanted not in EXPORTERS:
        raise ExporterError(f"{EXPORTER}={wanted} is not supported; allowed: {', '.join(EXPORTERS)}")
    if os.environ.get(DISABLED, "").lower() == "true":
        return None
    if wanted == "otlp":
        transport: SpanTransport = otlp_exporter(TRACES)
        return transport
    return ConsoleTransport() if wanted == "console" else None
