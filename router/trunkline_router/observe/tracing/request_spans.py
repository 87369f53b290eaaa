"""The spans of a request: its own, and under it admission, tokenize, and for each worker route and attempt. A call that
was refused before it became a request has one span."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.trace import SpanKind, Status, StatusCode

from trunkline.status import QUOTA_EXCEEDED
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline_router.observe.tracing.request_attributes import (
    POST,
    is_servers_fault,
    refused_attributes,
    request_attributes,
    span_name,
    status,
)
from trunkline_router.observe.tracing.trace_builder import UNSET, Attributes, TraceBuilder
from trunkline_router.record.refused_calls import RefusedCall
from trunkline_router.record.request_record import AttemptRecord, PlacementRecord, RequestRecord
from trunkline_router.routing.policy import Candidate
from trunkline_runtime.telemetry import genai
from trunkline_runtime.telemetry.span_queue import Spans
from trunkline_runtime.telemetry.timeline_phases import phases_of

MOST_CHOICES = 4  # of an attempt, whose spans are made

ALWAYS_TOLD = frozenset(("matched_tokens", "cost_s"))  # of a candidate


def later_spans_of(record: RequestRecord, kept: Sequence[str]) -> Spans:
    """Returns what makes all spans of a request that ends now. It keeps what the record drops once its listeners were
    told, but no table of the fleet: thousands may wait for a collector.

    kept: why it is exported
    """
    for placement in record.placements:
        placement.keep_candidates()
    return partial(spans_of, record, kept, record.sampling)


def spans_of(
    record: RequestRecord, kept: Sequence[str], sampling: SamplingParams | None, resource: Resource
) -> Sequence[ReadableSpan]:
    """Makes all spans of a request.

    If the request was not sampled when it began, its workers export nothing. Their spans are made here then.
    """
    trace = TraceBuilder(record, resource)
    trace.add(
        span_name(record.protocol, POST, record.endpoint),
        record.parent_span_id,
        record.started_s,
        record.started_s if record.ended_s is None else record.ended_s,
        request_attributes(record, sampling, kept),
        events=list(_events(trace)),
        span_id=record.span_id,
        kind=SpanKind.SERVER,
        status=status(record),
        is_parent_remote=True,
    )
    if record.tokenized is not None:
        tokens = record.prompt_tokens if record.choices else None
        trace.add("tokenize", record.span_id, *record.tokenized, {"trunkline.prompt_tokens": tokens})
    if record.admitted is not None:
        is_refused = record.outcome == QUOTA_EXCEEDED
        trace.add("admission", record.span_id, *record.admitted, {"trunkline.is_refused": is_refused})
    for placement in record.placements:
        _add_route(trace, placement)
    for previous, attempt in zip([None, *record.attempts], record.attempts, strict=False):
        _add_attempt(trace, attempt, previous)
    return trace.spans


def refused_span(
    call: RefusedCall, record: RequestRecord, ended_s: float, kept: str, resource: Resource
) -> Sequence[ReadableSpan]:
    """One span.  record: says its place in its trace, and when it began"""
    trace = TraceBuilder(record, resource)
    trace.add(
        span_name(call.protocol, call.method, call.route),
        record.parent_span_id,
        record.started_s,
        ended_s,
        refused_attributes(call, kept),
        kind=SpanKind.SERVER,
        status=Status(StatusCode.ERROR) if is_servers_fault(call) else UNSET,
        is_parent_remote=True,
    )
    return trace.spans


def _events(trace: TraceBuilder) -> Iterator[Event]:
    """What the client saw: the first token, and the answer's moves to other workers."""
    record = trace.record
    if record.first_token_s is not None:
        yield trace.event("first token", record.first_token_s)
    silences = record.silences
    for place, (lost, following) in enumerate(pairwise(record.attempts)):
        silence = silences.get(place)
        attributes: Attributes = {
            "trunkline.worker": lost.worker,
            "trunkline.problem": lost.problem,
            "trunkline.next_worker": following.worker,
            "trunkline.tokens": following.resumed_at_tokens or 0,
            "trunkline.silence_s": None if silence is None else silence.duration_s,
        }
        yield trace.event("failover", following.started_s, attributes)


def _add_route(trace: TraceBuilder, placement: PlacementRecord) -> None:
    attributes = {
        "trunkline.route.candidates": placement.num_workers,
        "trunkline.worker": placement.worker or None,
        "trunkline.route.policy": placement.policy or None,
        "trunkline.route.matched_tokens": placement.matched_tokens if placement.worker else None,
        "trunkline.route.reason": placement.reason or None,
        "trunkline.route.predicted_ttft_s": placement.predicted_ttft_s,
    }
    decided_s = placement.time.end_s
    events = [trace.event("candidate", decided_s, _of_candidate(each)) for each in placement.candidates]
    trace.add("route", trace.record.span_id, *placement.time, attributes, events=events)


def _of_candidate(candidate: Candidate) -> Attributes:
    """What is zero is left out, but for a few."""
    return {name: value for name, value in candidate._asdict().items() if value or name in ALWAYS_TOLD}


def _add_attempt(trace: TraceBuilder, attempt: AttemptRecord, previous: AttemptRecord | None) -> None:
    record = trace.record
    attributes = {
        "trunkline.request_id": record.request_id,
        "trunkline.worker": attempt.worker,
        "trunkline.ended": attempt.ended,
        "trunkline.problem": attempt.problem or None,
        "trunkline.resumed_at_tokens": attempt.resumed_at_tokens,
    }
    first_s = attempt.first_output_s
    ended_s = attempt.ended_s
    if ended_s is None:
        ended_s = attempt.started_s if record.ended_s is None else record.ended_s
    trace.add(
        "attempt",
        record.span_id,
        attempt.started_s,
        ended_s,
        attributes,
        events=[] if first_s is None else [trace.event("first output", first_s)],
        links=() if previous is None else (trace.link(previous.span_id),),
        span_id=attempt.span_id,
        kind=SpanKind.CLIENT,
        status=Status(StatusCode.ERROR, attempt.ended) if attempt.is_lost else UNSET,
    )
    if not record.is_sampled:
        _add_worker_spans(trace, attempt)


def _add_worker_spans(trace: TraceBuilder, attempt: AttemptRecord) -> None:
    """Adds worker.generate and its phases for the first choices. Their names are the worker's own."""
    for choice, timeline in enumerate(attempt.timelines[:MOST_CHOICES]):
        record = trace.record
        received_s = record.started_s + (timeline.received.ToNanoseconds() - record.started_unix_ns) / 1e9
        facts = {
            "trunkline.request_id": record.request_id,
            "trunkline.worker": attempt.worker,
            "trunkline.from_timeline": True,
            "trunkline.device_s": timeline.device_s,
            "trunkline.cached_tokens": timeline.cached_tokens,
            "trunkline.part": choice if len(attempt.timelines) > 1 else None,
            **genai.spelled({genai.USAGE_CACHE_READ_INPUT_TOKENS: timeline.cached_tokens}),
        }
        span_id = trace.add("worker.generate", attempt.span_id, received_s, received_s + timeline.ended_s, facts)
        previous_id = span_id
        for phase in phases_of(timeline):
            previous_id = trace.add(
                phase.name,
                previous_id if phase.is_part else span_id,
                received_s + phase.start_s,
                received_s + phase.end_s,
                phase.attributes,
                events=[trace.event(name, received_s + at_s, attributes) for at_s, name, attributes in phase.events],
            )
