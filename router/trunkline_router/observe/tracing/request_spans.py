"""The spans of a request: its own, and under it admission, tokenize, and for each worker route and attempt."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from opentelemetry.trace import SpanKind, StatusCode

from trunkline.status import QUOTA_EXCEEDED
from trunkline_router.observe.tracing.request_attributes import Attributes, request_attributes, span_name, status
from trunkline_router.observe.tracing.trace_builder import TraceBuilder
from trunkline_router.observe.tracing.worker_spans import add_worker_spans
from trunkline_router.record.request_record import MOST_CANDIDATES, AttemptRecord, PlacementRecord, RequestRecord
from trunkline_router.routing.policy import Candidate
from trunkline_runtime.telemetry.otlp_spans import UNSET, span_attributes, unique_attribute
from trunkline_runtime.telemetry.otlp_spans import status as otlp_status

ALWAYS_TOLD = frozenset(("matched_tokens", "cost_s"))  # of a candidate

IS_REFUSED = [span_attributes({"trunkline.is_refused": value}) for value in (False, True)]


class EndedRequest:
    """A request whose spans are wanted. Keeps what its record drops once its listeners were told, but no table of the
    fleet: thousands may wait for a collector.

    kept: why it is exported
    candidates: of each placement, the chosen worker, then the next best
    """

    __slots__ = ("candidates", "kept", "record", "sampling")

    def __init__(self, record: RequestRecord, kept: Sequence[str]) -> None:
        self.record = record
        self.kept = kept
        self.sampling = record.sampling
        plans = (placement.plan for placement in record.placements)
        self.candidates = [() if plan is None else plan.best(MOST_CANDIDATES) for plan in plans]


def spans_of(ended: EndedRequest) -> Sequence[bytes]:
    """Writes all spans of a request.

    If the request was not sampled when it began, its workers export nothing. Their spans are written here then.
    """
    record = ended.record
    trace = TraceBuilder(record)
    trace.add(
        span_name(record.protocol, record.endpoint),
        record.parent_span_id,
        record.started_s,
        record.started_s if record.ended_s is None else record.ended_s,
        request_attributes(record, ended.sampling, ended.kept),
        *_events(trace),
        span_id=record.span_id,
        kind=SpanKind.SERVER,
        status=status(record),
        is_parent_remote=True,
    )
    if record.tokenized is not None:
        found = span_attributes({"trunkline.prompt_tokens": record.prompt_tokens} if record.choices else {})
        trace.add("tokenize", record.span_id, *record.tokenized, found)
    if record.admitted is not None:
        trace.add("admission", record.span_id, *record.admitted, IS_REFUSED[record.outcome == QUOTA_EXCEEDED])
    for placement, candidates in zip(record.placements, ended.candidates, strict=True):
        _add_route(trace, placement, candidates)
    previous: AttemptRecord | None = None
    for attempt in record.attempts:
        _add_attempt(trace, attempt, previous)
        previous = attempt
    return trace.spans


def _events(trace: TraceBuilder) -> Iterator[bytes]:
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


def _add_route(trace: TraceBuilder, placement: PlacementRecord, candidates: Sequence[Candidate]) -> None:
    attributes: Attributes = {"trunkline.route.candidates": placement.num_workers}
    if placement.worker:
        attributes |= {
            "trunkline.worker": placement.worker,
            "trunkline.route.policy": placement.policy,
            "trunkline.route.matched_tokens": placement.matched_tokens,
        }
    if placement.predicted_ttft_s is not None:
        attributes["trunkline.route.predicted_ttft_s"] = placement.predicted_ttft_s
    decided_s = placement.time.end_s
    events = [trace.event("candidate", decided_s, _of_candidate(each)) for each in candidates]
    reason = unique_attribute("trunkline.route.reason", placement.reason) if placement.worker else b""
    trace.add("route", trace.record.span_id, *placement.time, span_attributes(attributes), reason, *events)


def _of_candidate(candidate: Candidate) -> Attributes:
    """What is zero is left out, but for a few."""
    told: Iterator[tuple[str, Any]] = zip(candidate._fields, candidate, strict=True)
    return {name: value for name, value in told if value or name in ALWAYS_TOLD}


def _add_attempt(trace: TraceBuilder, attempt: AttemptRecord, previous: AttemptRecord | None) -> None:
    record = trace.record
    attributes: Attributes = {
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
        span_attributes(attributes),
        unique_attribute("trunkline.request_id", record.request_id),
        *events,
        b"" if previous is None else trace.link(previous.span_id),
        span_id=attempt.span_id,
        kind=SpanKind.CLIENT,
        status=otlp_status(StatusCode.ERROR, attempt.ended) if attempt.is_lost else UNSET,
    )
    if not record.is_sampled:
        add_worker_spans(trace, attempt)
