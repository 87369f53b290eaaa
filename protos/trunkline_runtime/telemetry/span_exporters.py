"""Makes the exporter of spans that the standard OTEL_* variables ask for."""

import os

from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SpanExporter

from trunkline_runtime.telemetry.otlp_exporter import TRACES, ExporterError, otlp_exporter

EXPORTER, DISABLED = "OTEL_TRACES_EXPORTER", "OTEL_SDK_DISABLED"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
EXPORTERS = ("otlp", "console", "none")


def span_exporter() -> SpanExporter | None:
    """The exporter that the variables ask for; None if there is none. Raises ExporterError."""
    wanted = os.environ.get(EXPORTER)  # an empty variable counts as unset, by OpenTelemetry's rules
    if not wanted:
        wanted = "otlp" if any(os.environ.get(name) for name in ENDPOINTS) else "none"
    if wanted not in EXPORTERS:
        raise ExporterError(f"{EXPORTER}={wanted} is not supported; allowed: {', '.join(EXPORTERS)}")
    if os.environ.get(DISABLED, "").lower() == "true":
        return None
    if wanted == "otlp":
        exporter: SpanExporter = otlp_exporter(TRACES)
        return exporter
    return ConsoleSpanExporter() if wanted == "console" else None
