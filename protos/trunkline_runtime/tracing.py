"""OpenTelemetry spans, joined across processes by W3C trace context."""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from typing import NamedTuple

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import Link, NonRecordingSpan, Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from trunkline.status import RequestRefused

_PROPAGATOR = TraceContextTextMapPropagator()
_TRACER_NAME = "trunkline"


EXPORTERS = ("otlp", "console", "none")
PROTOCOLS = ("grpc", "http/protobuf")
# The SDK reads these. They decide about traces that start here, also for processes that continue and export them.
SDK_VARIABLES = ("OTEL_SDK_DISABLED", "OTEL_TRACES_SAMPLER")


class TracingError(ValueError):
    """An OTEL_* variable is invalid. The message is one line for a person."""


def configure_tracing(service_name: str) -> None:
    """Exports spans if the standard OTEL_* variables ask for it; otherwise spans only pass the trace context on.

    Exits with status 2 and one line on standard error if a variable is invalid, as for any other setting.
    """
    try:
        exporter = _exporter()
    except TracingError as error:
        print(f"{service_name}: {error}", file=sys.stderr)
        sys.exit(2)
    if exporter is None and not any(os.environ.get(name) for name in SDK_VARIABLES):
        trace.set_tracer_provider(_CarrierProvider())
        return
    provider = TracerProvider(
        resource=Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", service_name)})
    )
    if exporter is not None:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    trace.set_tracer_provider(provider)


def shutdown_tracing() -> None:
    """Exports the spans that are still buffered."""
    provider = trace.get_tracer_provider()
    if isinstance(provider, TracerProvider):
        provider.shutdown()


def _exporter() -> SpanExporter | None:
    """The exporter that the variables ask for; None if there is none. Raises TracingError."""
    wanted = os.environ.get("OTEL_TRACES_EXPORTER")  # an empty variable counts as unset, by OpenTelemetry's rules
    if not wanted:
        named = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
        wanted = "otlp" if any(os.environ.get(name) for name in named) else "none"
    if wanted not in EXPORTERS:
        raise TracingError(f"OTEL_TRACES_EXPORTER={wanted} is not supported; allowed: {', '.join(EXPORTERS)}")
    if wanted == "otlp":
        return _otlp_exporter()
    return ConsoleSpanExporter() if wanted == "console" else None


def _otlp_exporter() -> SpanExporter:
    variables = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    variable = next((name for name in variables if os.environ.get(name)), variables[-1])
    protocol = os.environ.get(variable) or PROTOCOLS[0]
    if protocol not in PROTOCOLS:
        raise TracingError(f"{variable}={protocol} is not supported; allowed: {', '.join(PROTOCOLS)}")
    kind = protocol.partition("/")[0]
    try:
        # Imported on demand: the import is slow, and the exporter over HTTP need not be installed.
        module = import_module(f"opentelemetry.exporter.otlp.proto.{kind}.trace_exporter")
        exporter: SpanExporter = module.OTLPSpanExporter()
        return exporter
    except ImportError as error:
        package = f"opentelemetry-exporter-otlp-proto-{kind}"
        raise TracingError(f"{variable}={protocol} needs the package {package} installed: {error}") from None
    except Exception as error:  # the library reads a dozen more variables, and may raise any error
        raise TracingError(f"the OTLP exporter cannot be made from the OTEL_* variables: {error}") from None


class _CarrierProvider(trace.TracerProvider):
    """Makes spans that are not exported: they only have ids, for logs and for other processes."""

    def get_tracer(self, *_: object, **__: object) -> trace.Tracer:
        return _CarrierTracer()


class _CarrierTracer(trace.NoOpTracer):
    def __init__(self) -> None:
        self._ids = RandomIdGenerator()

    def start_span(self, name: str, context: Context | None = None, *_: object, **__: object) -> Span:
        """A trace that starts here is sampled, because other processes may export their spans of it."""
        parent = trace.get_current_span(context).get_span_context()
        span_id = self._ids.generate_span_id()
        if parent.is_valid:
            carried = SpanContext(parent.trace_id, span_id, False, parent.trace_flags, parent.trace_state)
        else:
            carried = SpanContext(self._ids.generate_trace_id(), span_id, False, TraceFlags(TraceFlags.SAMPLED))
        return NonRecordingSpan(carried)


def _tracer() -> trace.Tracer:
    return _tracer_of(trace.get_tracer_provider())


@lru_cache(maxsize=1)
def _tracer_of(provider: trace.TracerProvider) -> trace.Tracer:
    """Cached: making a tracer takes as long as making a span."""
    return provider.get_tracer(_TRACER_NAME)


@contextmanager
def request_span(
    name: str,
    *,
    traceparent: str = "",
    tracestate: str = "",
    attributes: Mapping[str, AttributeValue] | None = None,
) -> Iterator[Span]:
    """The span of one request: current inside the block, and a child of the caller's span if there is one."""
    carrier = {"traceparent": traceparent, "tracestate": tracestate} if traceparent else {}
    context = _PROPAGATOR.extract(carrier) if carrier else None
    span = _tracer().start_span(name, context=context, kind=SpanKind.SERVER, attributes=attributes)
    # Without the exception: its message may quote the request.
    with trace.use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
        try:
            yield span
        except RequestRefused as refused:
            span.set_status(Status(StatusCode.ERROR, refused.reason))
            raise
        except Exception as error:
            span.set_status(Status(StatusCode.ERROR, type(error).__name__))
            raise


def start_span(
    name: str,
    *,
    traceparent: str = "",
    tracestate: str = "",
    attributes: Mapping[str, AttributeValue] | None = None,
    linked_traceparent: str = "",
    start_unix_ns: int | None = None,
) -> Span:
    """The span of one request, which the caller must end; it is not made current.

    linked_traceparent: of a span that this one continues, for example a request's earlier attempt
    """
    carrier = {"traceparent": traceparent, "tracestate": tracestate} if traceparent else {}
    context = _PROPAGATOR.extract(carrier)
    return _tracer().start_span(
        name,
        context=context,
        kind=SpanKind.SERVER,
        attributes=attributes,
        links=_links_to(linked_traceparent),
        start_time=start_unix_ns,
    )


def _links_to(traceparent: str) -> list[Link]:
    """A link to a span of another process; none if its context makes no sense."""
    if not traceparent:
        return []
    context = trace.get_current_span(_PROPAGATOR.extract({"traceparent": traceparent})).get_span_context()
    return [Link(context)] if context.is_valid and context.is_remote else []


class SpanEvent(NamedTuple):
    """Something that happened during a span."""

    name: str
    unix_ns: int
    attributes: Mapping[str, AttributeValue]


def add_child(
    parent: Span,
    name: str,
    start_unix_ns: int,
    end_unix_ns: int,
    attributes: Mapping[str, AttributeValue] | None = None,
    events: Iterable[SpanEvent] = (),
) -> None:
    """Adds a span that is over under one that is not. Times are nanoseconds of Unix time."""
    context = trace.set_span_in_context(parent, Context())
    span = _tracer().start_span(name, context=context, attributes=attributes, start_time=start_unix_ns)
    for event in events:
        span.add_event(event.name, event.attributes, timestamp=event.unix_ns)
    span.end(max(start_unix_ns, end_unix_ns))


def current_trace_context() -> tuple[str, str]:
    """(traceparent, tracestate) of the current span; empty strings if there is none."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier)
    return carrier.get("traceparent", ""), carrier.get("tracestate", "")


def trace_context_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> tuple[str, str]:
    """(traceparent, tracestate) in gRPC metadata; empty strings if absent."""
    found = {
        key: value for key, value in metadata or () if key in ("traceparent", "tracestate") and isinstance(value, str)
    }
    return found.get("traceparent", ""), found.get("tracestate", "")
