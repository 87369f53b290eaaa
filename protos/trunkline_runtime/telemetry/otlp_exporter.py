"""Makes the exporters of spans and metrics that the standard OTEL_* variables ask for."""

import logging
import os
from importlib import import_module
from typing import Any

from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SpanExporter

GRPC, HTTP = PROTOCOLS = ("grpc", "http/protobuf")
TRACES, METRICS = "traces", "metrics"
EXPORTER, DISABLED = "OTEL_TRACES_EXPORTER", "OTEL_SDK_DISABLED"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
EXPORTERS = ("otlp", "console", "none")

_LIBRARY = "opentelemetry.exporter.otlp.proto"
_CLASSES = {
    (TRACES, GRPC): (f"{_LIBRARY}.grpc.trace_exporter", "OTLPSpanExporter"),
    (TRACES, HTTP): (f"{_LIBRARY}.http.trace_exporter", "OTLPSpanExporter"),
    (METRICS, GRPC): (f"{_LIBRARY}.grpc.metric_exporter", "OTLPMetricExporter"),
    (METRICS, HTTP): (f"{_LIBRARY}.http.metric_exporter", "OTLPMetricExporter"),
}


class ExporterError(ValueError):
    """An OTEL_* variable is invalid. The message is one line for a person."""


def span_exporter() -> SpanExporter | None:
    """The exporter of spans that the variables ask for; None if there is none. Raises ExporterError."""
    wanted = os.environ.get(EXPORTER)  # an empty variable counts as unset, by OpenTelemetry's rules
    if not wanted:
        wanted = "otlp" if any(os.environ.get(name) for name in ENDPOINTS) else "none"
    if wanted not in EXPORTERS:
        raise ExporterError(f"{EXPORTER}={wanted} is not supported; allowed: {', '.join(EXPORTERS)}")
    if wanted == "none" or os.environ.get(DISABLED, "").lower() == "true":
        return None
    if wanted == "console":
        return ConsoleSpanExporter(formatter=lambda span: span.to_json(indent=None) + "\n")
    exporter: SpanExporter = otlp_exporter(TRACES)
    return exporter


def otlp_exporter(signal: str) -> Any:
    """OpenTelemetry's exporter to a collector for TRACES or METRICS. Raises ExporterError."""
    variables = (f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    variable = next((name for name in variables if os.environ.get(name)), variables[-1])
    protocol = os.environ.get(variable) or GRPC
    if protocol not in PROTOCOLS:
        raise ExporterError(f"{variable}={protocol} is not supported; allowed: {', '.join(PROTOCOLS)}")
    module_name, class_name = _CLASSES[signal, protocol]
    try:
        # Imported on demand, because the import is slow.
        exporter = getattr(import_module(module_name), class_name)
        made = exporter(session=_bounded_session()) if protocol == HTTP else exporter()
    except ImportError as error:
        package = f"opentelemetry-exporter-otlp-proto-{protocol.partition('/')[0]}"
        raise ExporterError(f"{variable}={protocol} needs the package {package} installed: {error}") from None
    except Exception as error:  # the library reads a dozen more variables, and may raise any error
        raise ExporterError(f"the OTLP exporter cannot be made from the OTEL_* variables: {error}") from None
    # From here on our own lines tell of failures. The library's quote the collector and are not JSON.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL + 1)
    return made


def _bounded_session() -> object:
    session: object = import_module("trunkline_runtime.telemetry.bounded_session").BoundedSession()
    return session
