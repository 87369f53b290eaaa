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
from trunkline.v1.worker_pb2 import Timeline
from trunkline_router.observe.tracing.request_attributes import (
    is_servers_fault,
    refused_attributes,
    refused_name,
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
        span_name(record),
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
        found: Attributes = {"trunkline.prompt_tokens": record.prompt_tokens} if record.choices else {}
        trace.add("tokenize", record.span_id, *record.tokenized, found)
    if record.admitted is not None:
        trace.add(
            "admission", record.span_id, *record.admitted, {"trunkline.is_refused": record.outcome == QUOTA_EXCEEDED}
        )
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
        refused_name(call),
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
        attributes: Attributes = {
            "trunkline.worker": lost.worker,
            "trunkline.problem": lost.problem,
            "trunkline.next_worker": following.worker,
            "trunkline.tokens": following.resumed_at_tokens or 0,
        }
        if (silence := silences.get(place)) is not None:
            attributes["trunkline.silence_s"] = silence.duration_s
        yield trace.event("failover", following.started_s, attributes)


def _add_route(trace: TraceBuilder, placement: PlacementRecord) -> None:
    attributes: Attributes = {"trunkline.route.candidates": placement.num_workers}
    if placement.worker:
        attributes |= {
            "trunkline.worker": placement.worker,
            "trunkline.route.policy": placement.policy,
            "trunkline.route.matched_tokens": placement.matched_tokens,
            "trunkline.route.reason": placement.reason,
        }
    if placement.predicted_ttft_s is not None:
        attributes["trunkline.route.predicted_ttft_s"] = placement.predicted_ttft_s
    decided_s = placement.time.end_s
    events = [trace.event("candidate", decided_s, _of_candidate(each)) for each in placement.candidates]
    trace.add("route", trace.record.span_id, *placement.time, attributes, events=events)


def _of_candidate(candidate: Candidate) -> Attributes:
    """What is zero is left out, but for a few."""
    return {name: value for name, value in candidate._asdict().items() if value or name in ALWAYS_TOLD}


def _add_attempt(trace: TraceBuilder, attempt: AttemptRecord, previous: AttemptRecord | None) -> None:
    record = trace.record
    attributes: Attributes = {
        "trunkline.request_id": record.request_id,
        "trunkline.worker": attempt.worker,
        "trunkline.ended": attempt.ended,
    }
    if attempt.problem:
        attributes["trunkline.problem"] = attempt.problem
    if attempt.resumed_at_tokens is not None:
        attributes["trunkline.resumed_at_tokens"] = attempt.resumed_at_tokens
    events = []
    if attempt.first_output_s is not None:
        events.append(trace.event("first output", attempt.first_output_s))
    ended_s = attempt.ended_s
    if ended_s is None:
        ended_s = attempt.started_s if record.ended_s is None else record.ended_s
    trace.add(
        "attempt",
        record.span_id,
        attempt.started_s,
        ended_s,
        attributes,
        events=events,
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
        facts: Attributes = {
            "trunkline.request_id": record.request_id,
            "trunkline.worker": attempt.worker,
            "trunkline.from_timeline": True,
            "trunkline.device_s": timeline.device_s,
            "trunkline.cached_tokens": timeline.cached_tokens,
        }
        facts |= genai.spelled({genai.USAGE_CACHE_READ_INPUT_TOKENS: timeline.cached_tokens})
        if len(attempt.timelines) > 1:
            facts["trunkline.part"] = choice
        span_id = trace.add("worker.generate", attempt.span_id, received_s, received_s + timeline.ended_s, facts)
        _add_phases(trace, span_id, received_s, timeline)


def _add_phases(trace: TraceBuilder, parent_id: int, received_s: float, timeline: Timeline) -> None:
    previous_id = parent_id
    for phase in phases_of(timeline):
        previous_id = trace.add(
            phase.name,
            previous_id if phase.is_part else parent_id,
            received_s + phase.start_s,
            received_s + phase.end_s,
            phase.attributes,
            events=[trace.event(name, received_s + at_s, attributes) for at_s, name, attributes in phase.events],
        )
