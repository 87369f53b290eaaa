"""Makes the transport of spans that the standard OTEL_* variables ask for."""

import os
from importlib import import_module
from typing import Protocol

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


def span_transport() -> SpanTransport | None:
    """The transport that the variables ask for; None if there is none. Raises ExporterError."""
    wanted = os.environ.get(EXPORTER)  # an empty variable counts as unset, by OpenTelemetry's rules
    if not wanted:
        wanted = "otlp" if any(os.environ.get(name) for name in ENDPOINTS) else "none"
    if wanted not in EXPORTERS:
        raise ExporterError(f"{EXPORTER}={wanted} is not supported; allowed: {', '.join(EXPORTERS)}")
    if os.environ.get(DISABLED, "").lower() == "true":
        return None
    transport: SpanTransport | None = None
    if wanted == "otlp":
        transport = otlp_exporter(TRACES)
    elif wanted == "console":  # imported on demand, because the import is slow
        transport = import_module("trunkline_runtime.telemetry.console_span_transport").ConsoleSpanTransport()
    return transport
