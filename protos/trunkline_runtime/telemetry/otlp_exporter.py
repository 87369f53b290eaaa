"""Makes the exporters of spans and metrics that the standard OTEL_* variables ask for."""

import logging
import os
from importlib import import_module
from typing import Any

from opentelemetry.sdk.trace.export import ConsoleSpanExporter

from trunkline_runtime.telemetry.otel_variables import VariableError, is_disabled, one_of

GRPC, HTTP = PROTOCOLS = ("grpc", "http/protobuf")
TRACES, METRICS = "traces", "metrics"
ENDPOINTS = {  # metrics are scraped unless a variable names them
    TRACES: ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"),
    METRICS: ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT",),
}
OTLP, CONSOLE, NONE = EXPORTERS = ("otlp", "console", "none")

_LIBRARY = "opentelemetry.exporter.otlp.proto"
_CLASSES = {
    (TRACES, GRPC): (f"{_LIBRARY}.grpc.trace_exporter", "OTLPSpanExporter"),
    (TRACES, HTTP): (f"{_LIBRARY}.http.trace_exporter", "OTLPSpanExporter"),
    (METRICS, GRPC): (f"{_LIBRARY}.grpc.metric_exporter", "OTLPMetricExporter"),
    (METRICS, HTTP): (f"{_LIBRARY}.http.metric_exporter", "OTLPMetricExporter"),
}


def is_exported(signal: str) -> bool:
    """Whether the variables ask for an export of TRACES or METRICS. Raises VariableError."""
    return _wanted(signal) != NONE


def exporter_of(signal: str) -> Any:
    """OpenTelemetry's exporter of TRACES or METRICS; None if the variables ask for none. Raises VariableError."""
    wanted = _wanted(signal)
    if wanted == NONE:
        return None
    if wanted == OTLP:
        return _otlp_exporter(signal)
    if signal == METRICS:
        return import_module("opentelemetry.sdk.metrics.export").ConsoleMetricExporter()
    return ConsoleSpanExporter(formatter=lambda span: span.to_json(indent=None) + "\n")


def _wanted(signal: str) -> str:
    default = OTLP if any(os.environ.get(name) for name in ENDPOINTS[signal]) else NONE
    wanted = one_of(EXPORTERS, f"OTEL_{signal.upper()}_EXPORTER", default)
    return NONE if is_disabled() else wanted


def _otlp_exporter(signal: str) -> Any:
    variables = (f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    variable = next((name for name in variables if os.environ.get(name)), variables[-1])
    protocol = one_of(PROTOCOLS, variable, GRPC)
    module_name, class_name = _CLASSES[signal, protocol]
    try:
        # Imported on demand, because the import is slow.
        options = {}
        if protocol == HTTP:
            options["session"] = import_module("trunkline_runtime.telemetry.bounded_session").BoundedSession()
        made = getattr(import_module(module_name), class_name)(**options)
    except ImportError as error:
        package = f"opentelemetry-exporter-otlp-proto-{protocol.partition('/')[0]}"
        raise VariableError(f"{variable}={protocol} needs the package {package} installed: {error}") from None
    except Exception as error:  # the library reads a dozen more variables, and may raise any error
        raise VariableError(f"the OTLP exporter cannot be made from the OTEL_* variables: {error}") from None
    # From here on our own lines tell of failures. The library's quote the collector and are not JSON.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL + 1)
    return made
