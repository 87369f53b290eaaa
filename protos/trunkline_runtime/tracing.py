"""OpenTelemetry spans, joined across processes by W3C trace context."""

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, NonRecordingSpan, Span, SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from trunkline_runtime.telemetry.otlp_exporter import DISABLED, ExporterError, span_exporter
from trunkline_runtime.telemetry.span_queue import QueueError, SpanQueue, span_queue
from trunkline_runtime.telemetry.trace_context import NONE_SAMPLED, HeadSampler, SamplerError, head_sampler

_PROPAGATOR = TraceContextTextMapPropagator()
# Of RPC and HTTP: the conventions for generative AI have no schema yet.
SCOPE = InstrumentationScope("trunkline", schema_url="https://opentelemetry.io/schemas/1.44.0")

# The SDK reads these. They decide about traces that start here, also for processes that continue and export them.
SDK_VARIABLES = (DISABLED, "OTEL_TRACES_SAMPLER")


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
    try:
        sampler, exporter = head_sampler(), span_exporter()
        queue = None if exporter is None else span_queue(exporter, resource)
    except (SamplerError, ExporterError, QueueError) as error:
        print(f"{service_name}: {error}", file=sys.stderr)
        sys.exit(2)
    if os.environ.get(DISABLED, "").lower() == "true":
        sampler = NONE_SAMPLED
    return Tracing(sampler, queue, resource)


def configure_tracing(service_name: str, instance: str = "") -> SpanQueue | None:
    """Sets up start_span(): spans are exported if the standard OTEL_* variables ask for it, and only pass the trace
    context on otherwise. Returns the queue before the exporter. Exits as open_tracing() does."""
    tracing = open_tracing(service_name, instance)
    if tracing.queue is None and not any(os.environ.get(name) for name in SDK_VARIABLES):
        trace.set_tracer_provider(_CarrierProvider())
        return None
    provider = TracerProvider(_follower(tracing.sampler), tracing.resource)
    if tracing.queue is not None:
        provider.add_span_processor(_Queued(tracing.queue))
    trace.set_tracer_provider(provider)
    return tracing.queue


def _follower(sampler: HeadSampler) -> ParentBased:
    """Follows the process that calls, also if routers do not follow their callers: a request's router has decided."""
    return ParentBased(TraceIdRatioBased(sampler.ratio))


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


def trace_context_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> tuple[str, str]:
    """(traceparent, tracestate) in gRPC metadata; empty strings if absent."""
    found = {
        key: value for key, value in metadata or () if key in ("traceparent", "tracestate") and isinstance(value, str)
    }
    return found.get("traceparent", ""), found.get("tracestate", "")
