"""The spans of a request: its own, and under it admission, tokenize, and for each worker route and attempt."""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import pairwise

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.trace import SpanKind, Status, StatusCode

from trunkline.status import QUOTA_EXCEEDED
from trunkline_router.routing.policy import Candidate
from trunkline_router.telemetry.request_record import AttemptRecord, PlacementRecord, RequestRecord
from trunkline_router.tracing.request_attributes import Attributes, request_attributes, span_name, status
from trunkline_router.tracing.trace_builder import UNSET, TraceBuilder
from trunkline_router.tracing.worker_spans import add_worker_spans

CANDIDATE_FIELDS = tuple(field.name for field in fields(Candidate))
ALWAYS_TOLD = ("worker_id", "matched_tokens", "cost_s")


def spans_of(record: RequestRecord, attributes: Attributes, resource: Resource) -> Sequence[ReadableSpan]:
    """All spans of a request that has ended. `attributes`: further ones of its own span.

    If the request was not sampled when it began, its workers export nothing. Their spans are made here then.
    """
    trace = TraceBuilder(record, resource)
    ended_s = record.started_s if record.ended_s is None else record.ended_s
    trace.add(
        span_name(record.protocol, record.endpoint),
        record.parent_span_id,
        record.started_s,
        ended_s,
        request_attributes(record) | attributes,
        span_id=record.span_id,
        kind=SpanKind.SERVER,
        events=_events(trace),
        status=status(record),
        is_parent_remote=True,
    )
    if record.tokenized is not None:
        found: Attributes = {"trunkline.prompt_tokens": record.prompt_tokens} if record.choices else {}
        trace.add("tokenize", record.span_id, *record.tokenized, found)
    if record.admitted is not None:
        is_refused = record.outcome == QUOTA_EXCEEDED
        trace.add("admission", record.span_id, *record.admitted, {"trunkline.is_refused": is_refused})
    for placement in record.placements:
        _add_route(trace, placement)
    previous: AttemptRecord | None = None
    for attempt in record.attempts:
        _add_attempt(trace, attempt, previous)
        previous = attempt
    return trace.spans


def _events(trace: TraceBuilder) -> Iterator[Event]:
    """What the client saw: the first token, and the answer's moves to other workers."""
    record = trace.record
    if record.first_token_s is not None:
        yield trace.event("first token", record.first_token_s, {})
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
            "trunkline.route.reason": placement.reason,
            "trunkline.route.matched_tokens": placement.matched_tokens,
        }
    if placement.predicted_ttft_s is not None:
        attributes["trunkline.route.predicted_ttft_s"] = placement.predicted_ttft_s
    decided_s = placement.time.end_s
    events = [trace.event("candidate", decided_s, _of_candidate(each)) for each in placement.candidates()]
    trace.add("route", trace.record.span_id, *placement.time, attributes, events=events)


def _of_candidate(candidate: Candidate) -> Attributes:
    """Terms of the cost that are zero are left out: each attribute costs microseconds to encode."""
    values = ((name, getattr(candidate, name)) for name in CANDIDATE_FIELDS)
    return {name: value for name, value in values if value or name in ALWAYS_TOLD}


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
        events.append(trace.event("first output", attempt.first_output_s, {}))
    ended_s = attempt.ended_s
    if ended_s is None:
        ended_s = attempt.started_s if record.ended_s is None else record.ended_s
    trace.add(
        "attempt",
        record.span_id,
        attempt.started_s,
        ended_s,
        attributes,
        span_id=attempt.span_id,
        kind=SpanKind.CLIENT,
        events=events,
        links=() if previous is None else (trace.link(previous.span_id),),
        status=Status(StatusCode.ERROR, attempt.ended) if attempt.is_lost else UNSET,
    )
    if not record.is_sampled:
        add_worker_spans(trace, attempt)
