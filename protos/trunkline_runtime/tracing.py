"""OpenTelemetry spans, joined across processes by W3C trace context."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, Span, SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from trunkline_runtime.telemetry.otel_variables import is_disabled, valid_variables
from trunkline_runtime.telemetry.otlp_exporter import TRACES, exporter_of
from trunkline_runtime.telemetry.span_queue import SpanQueue, span_queue
from trunkline_runtime.telemetry.trace_context import NONE_SAMPLED, HeadSampler, head_sampler

_PROPAGATOR = TraceContextTextMapPropagator()
# Of RPC and HTTP: the conventions for generative AI have no schema yet.
SCOPE = InstrumentationScope("trunkline", schema_url="https://opentelemetry.io/schemas/1.44.0")


@dataclass(frozen=True, slots=True)
class Tracing:
    """How a process traces, as its environment says.

    queue: exports spans; None: they are not exported, and the trace context is passed on
    """

    sampler: HeadSampler
    queue: SpanQueue | None
    resource: Resource


def open_tracing(service_name: str, instance: str = "") -> Tracing:
    """Reads the OTEL_* variables. `instance`: the process's name among those of its service.

    Exits with status 2 and one line on standard error if a variable is invalid, as for any other setting.
    """
    attributes = {"service.name": os.environ.get("OTEL_SERVICE_NAME") or service_name}
    if instance:
        attributes["service.instance.id"] = instance
    resource = Resource.create(attributes)
    with valid_variables(service_name):
        sampler, exporter = head_sampler(), exporter_of(TRACES)
        queue = None if exporter is None else span_queue(exporter, resource)
    return Tracing(NONE_SAMPLED if is_disabled() else sampler, queue, resource)


def configure_tracing(service_name: str, instance: str = "") -> SpanQueue | None:
    """Sets up start_span(): spans are exported if the standard OTEL_* variables ask for it; otherwise they are their
    callers' alone. Returns the queue before the exporter. Exits as open_tracing() does."""
    tracing = open_tracing(service_name, instance)
    if tracing.queue is not None:
        # Follows the process that calls, also if routers do not follow their callers: a request's router has decided.
        provider = TracerProvider(ParentBased(TraceIdRatioBased(tracing.sampler.ratio)), tracing.resource)
        provider.add_span_processor(_Queued(tracing.queue))
        trace.set_tracer_provider(provider)
    return tracing.queue


def shutdown_tracing() -> None:
    """Exports the spans that are still queued."""
    provider = trace.get_tracer_provider()
    if isinstance(provider, TracerProvider):
        provider.shutdown()


class _Queued(SpanProcessor):
    """Puts the spans of the SDK into a queue."""

    def __init__(self, queue: SpanQueue) -> None:
        self._queue = queue

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is not None and span.context.trace_flags.sampled:
            self._queue.put(lambda _: (span,))

    def shutdown(self) -> None:
        self._queue.close()


def _tracer() -> trace.Tracer:
    return _tracer_of(trace.get_tracer_provider())


@lru_cache(maxsize=1)
def _tracer_of(provider: trace.TracerProvider) -> trace.Tracer:
    """Cached: making a tracer takes as long as making a span."""
    return provider.get_tracer(SCOPE.name, schema_url=SCOPE.schema_url)


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
) -> Span:
    """Adds a span that is over, and returns it. Times are nanoseconds of Unix time."""
    context = trace.set_span_in_context(parent, Context())
    span = _tracer().start_span(name, context=context, attributes=attributes, start_time=start_unix_ns)
    for event in events:
        span.add_event(event.name, event.attributes, timestamp=event.unix_ns)
    span.end(max(start_unix_ns, end_unix_ns))
    return span
