"""Makes an exporter that sends spans or metrics to a collector, as the standard OTEL_* variables say."""

import logging
import os
from importlib import import_module
from typing import Any

GRPC, HTTP = PROTOCOLS = ("grpc", "http/protobuf")
TRACES, METRICS = "traces", "metrics"
_LIBRARY = "opentelemetry.exporter.otlp.proto"
_CLASSES = {
    (TRACES, GRPC): ("trunkline_runtime.telemetry.grpc_span_transport", "GrpcSpanTransport"),
    (TRACES, HTTP): ("trunkline_runtime.telemetry.http_span_transport", "HttpSpanTransport"),
    (METRICS, GRPC): (f"{_LIBRARY}.grpc.metric_exporter", "OTLPMetricExporter"),
    (METRICS, HTTP): (f"{_LIBRARY}.http.metric_exporter", "OTLPMetricExporter"),
}


class ExporterError(ValueError):
    """An OTEL_* variable is invalid. The message is one line for a person."""


def otlp_exporter(signal: str) -> Any:
    """A SpanTransport for TRACES, the library's exporter for METRICS. Raises ExporterError."""
    variables = (f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    variable = next((name for name in variables if os.environ.get(name)), variables[-1])
    protocol = os.environ.get(variable) or GRPC
    if protocol not in PROTOCOLS:
        raise ExporterError(f"{variable}={protocol} is not supported; allowed: {', '.join(PROTOCOLS)}")
    module_name, class_name = _CLASSES[signal, protocol]
    try:
        # Imported on demand, because the import is slow.
        module = import_module(module_name)
        options = {"session": _bounded_session()} if (signal, protocol) == (METRICS, HTTP) else {}
        exporter = getattr(module, class_name)(**options)
    except ExporterError:
        raise
    except ImportError as error:
        package = f"opentelemetry-exporter-otlp-proto-{protocol.partition('/')[0]}"
        raise ExporterError(f"{variable}={protocol} needs the package {package} installed: {error}") from None
    except Exception as error:  # the library reads a dozen more variables, and may raise any error
        raise ExporterError(f"the OTLP exporter cannot be made from the OTEL_* variables: {error}") from None
    # From here on our own lines tell of failures. The library's quote the collector and are not JSON.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL + 1)
    return exporter


def _bounded_session() -> object:
    session: object = import_module("trunkline_runtime.telemetry.bounded_session").BoundedSession()
    return session
