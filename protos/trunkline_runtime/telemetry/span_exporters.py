"""Makes the exporter of spans that the standard OTEL_* variables ask for."""

import logging
import os
from importlib import import_module

from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SpanExporter

EXPORTER, DISABLED = "OTEL_TRACES_EXPORTER", "OTEL_SDK_DISABLED"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
EXPORTERS = ("otlp", "console", "none")
GRPC, HTTP = PROTOCOLS = ("grpc", "http/protobuf")


class ExporterError(ValueError):
    """An OTEL_* variable is invalid. The message is one line for a person."""


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
        return _otlp_exporter()
    return ConsoleSpanExporter() if wanted == "console" else None


def _otlp_exporter() -> SpanExporter:
    variable = next((name for name in PROTOCOL_VARIABLES if os.environ.get(name)), PROTOCOL_VARIABLES[-1])
    protocol = os.environ.get(variable) or GRPC
    if protocol not in PROTOCOLS:
        raise ExporterError(f"{variable}={protocol} is not supported; allowed: {', '.join(PROTOCOLS)}")
    kind = protocol.partition("/")[0]
    try:
        # Imported on demand, because the import is slow.
        module = import_module(f"opentelemetry.exporter.otlp.proto.{kind}.trace_exporter")
        options = {} if protocol == GRPC else {"session": _bounded_session()}
        exporter: SpanExporter = module.OTLPSpanExporter(**options)
    except ImportError as error:
        package = f"opentelemetry-exporter-otlp-proto-{kind}"
        raise ExporterError(f"{variable}={protocol} needs the package {package} installed: {error}") from None
    except Exception as error:  # the library reads a dozen more variables, and may raise any error
        raise ExporterError(f"the OTLP exporter cannot be made from the OTEL_* variables: {error}") from None
    # From here on SpanQueue tells of failures. The library's lines quote the collector and are not JSON.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL + 1)
    return exporter


def _bounded_session() -> object:
    session: object = import_module("trunkline_runtime.telemetry.bounded_session").BoundedSession()
    return session
