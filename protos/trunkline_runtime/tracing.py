"""OpenTelemetry spans, joined across processes by W3C trace context."""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.trace import Span, SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

_PROPAGATOR = TraceContextTextMapPropagator()
_TRACER_NAME = "trunkline"


def configure_tracing(service_name: str) -> None:
    """Exports spans where the standard OTEL_* variables say so; otherwise spans only carry the trace on."""
    provider = TracerProvider(
        resource=Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", service_name)})
    )
    exporter = _exporter()
    if exporter is not None:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)


def shutdown_tracing() -> None:
    """Sends what is still buffered."""
    provider = trace.get_tracer_provider()
    if isinstance(provider, TracerProvider):
        provider.shutdown()


def _exporter() -> SpanExporter | None:
    wanted = os.environ.get("OTEL_TRACES_EXPORTER")
    if wanted is None:
        named = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
        wanted = "otlp" if any(name in os.environ for name in named) else "none"
    if wanted == "otlp":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter()
    if wanted == "console":
        return ConsoleSpanExporter()
    if wanted == "none":
        return None
    raise ValueError(f"OTEL_TRACES_EXPORTER={wanted} is not supported; allowed: otlp, console, none")


@contextmanager
def request_span(
    name: str,
    *,
    traceparent: str = "",
    tracestate: str = "",
    attributes: Mapping[str, AttributeValue] | None = None,
) -> Iterator[Span]:
    """The span of one request, current inside the block, a child of the caller's span where one is given."""
    carrier = {"traceparent": traceparent, "tracestate": tracestate} if traceparent else {}
    tracer = trace.get_tracer(_TRACER_NAME)
    with tracer.start_as_current_span(
        name, context=_PROPAGATOR.extract(carrier) if carrier else None, kind=SpanKind.SERVER, attributes=attributes
    ) as span:
        yield span


def start_span(
    name: str, *, traceparent: str = "", tracestate: str = "", attributes: Mapping[str, AttributeValue] | None = None
) -> Span:
    """The same without a block: the caller ends it."""
    carrier = {"traceparent": traceparent, "tracestate": tracestate} if traceparent else {}
    return trace.get_tracer(_TRACER_NAME).start_span(
        name, context=_PROPAGATOR.extract(carrier), kind=SpanKind.SERVER, attributes=attributes
    )


def current_trace_context() -> tuple[str, str]:
    """(traceparent, tracestate) of the current span; empty where there is none."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier)
    return carrier.get("traceparent", ""), carrier.get("tracestate", "")


def trace_context_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> tuple[str, str]:
    """(traceparent, tracestate) in gRPC metadata; empty where there is none."""
    found = {
        key: value for key, value in metadata or () if key in ("traceparent", "tracestate") and isinstance(value, str)
    }
    return found.get("traceparent", ""), found.get("tracestate", "")
