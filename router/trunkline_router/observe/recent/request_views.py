"""A request's record as messages: a line of a list, and the whole timeline. Content is not in the record."""

from collections.abc import Iterator

from trunkline.v1.fleet_pb2 import (
    AttemptView,
    ChoiceView,
    ChunkView,
    GapView,
    GetRequestResponse,
    PlacementView,
    RequestSummary,
    RouteCandidate,
    TtftPart,
)
from trunkline.v1.worker_pb2 import Timeline
from trunkline_router.observe.recent.recent_requests import ShownRequest
from trunkline_router.observe.recent.viewer import Viewer
from trunkline_router.record.request_record import AttemptRecord, PlacementRecord
from trunkline_router.routing.policy import Candidate

MOST_COUNT = (1 << 32) - 1


def summary_of(request: ShownRequest, viewer: Viewer) -> RequestSummary:
    """Returns a request's line in a list."""
    record = request.record
    shown = RequestSummary(
        request_id=record.request_id,
        tenant=record.tenant,
        model=record.model,
        endpoint=record.endpoint,
        protocol=record.protocol,
        lane=record.lane,
        started_unix_ms=record.started_unix_ns // 1_000_000,
        is_running=request.is_running,
        outcome="" if request.is_running else record.outcome,
        is_failed=record.is_failed,
        attempts=len(record.attempts),
        prompt_tokens=record.prompt_tokens,
        completion_tokens=record.completion_tokens,
        reasoning_tokens=record.reasoning_tokens,
        tool_calls=record.tool_calls,
        choices=record.choices,
        inputs=record.inputs,
        ttft_s=record.ttft_s,
        e2e_s=request.end_s - record.started_s,
        cause=request.cause,
        refused_by="" if request.is_running else record.refused_by,
        refused_field=record.refused_field,
    )
    if viewer.sees_cache:
        shown.worker_id, shown.cached_tokens = record.worker, record.cached_tokens
        shown.cache_miss, shown.seen_tokens = record.cache_miss, record.seen_tokens
    return shown


def timeline_of(request: ShownRequest, viewer: Viewer) -> GetRequestResponse:
    """Returns the whole timeline, as far as the viewer may see it."""
    record = request.record
    shown = GetRequestResponse(
        summary=summary_of(request, viewer),
        trace_id=f"{record.trace_id:032x}" if record.trace_id else "",
        max_tokens=record.max_tokens,
        cost=record.cost,
        stalled_s=record.stalled_s,
        ttft_parts=[
            TtftPart(
                part=part.part,
                start_s=part.start_s,
                duration_s=part.duration_s,
                note=part.note if viewer.sees_cache else "",
            )
            for part in request.parts()
        ],
    )
    if viewer.sees_cache:
        zero_s = record.started_s
        shown.placements.extend(_placement(placement, zero_s, viewer) for placement in record.placements)
        shown.attempts_made.extend(_attempt(attempt, zero_s, request.end_s, viewer) for attempt in record.attempts)
    return shown


def _placement(placement: PlacementRecord, zero_s: float, viewer: Viewer) -> PlacementView:
    shown = PlacementView(
        start_s=placement.time.start_s - zero_s,
        duration_s=placement.time.duration_s,
        worker_id=placement.worker,
        policy=placement.policy,
        matched_tokens=placement.matched_tokens,
    )
    if viewer.is_operator:  # these depend on the requests of others
        shown.reason = placement.reason
        if placement.predicted_ttft_s is not None:
            shown.predicted_ttft_s = placement.predicted_ttft_s
        shown.candidates.extend(_candidate(candidate) for candidate in placement.candidates)
    return shown


def _candidate(candidate: Candidate) -> RouteCandidate:
    bounded = candidate._replace(running=min(MOST_COUNT, candidate.running))
    return RouteCandidate(**bounded._asdict())


def _attempt(attempt: AttemptRecord, zero_s: float, now_s: float, viewer: Viewer) -> AttemptView:
    start_s, is_over = attempt.started_s - zero_s, attempt.ended_s is not None
    first_s, end_s = attempt.first_output_s, attempt.ended_s if attempt.ended_s is not None else now_s
    return AttemptView(
        worker_id=attempt.worker,
        start_s=start_s,
        first_output_s=None if first_s is None else first_s - zero_s,
        end_s=end_s - zero_s,
        ended=attempt.ended if is_over else "",
        resumed_at_tokens=attempt.resumed_at_tokens or 0,
        problem=attempt.problem if viewer.is_operator else "",
        choices=[_choice(timeline, start_s, viewer) for timeline in attempt.timelines],
    )


def _choice(timeline: Timeline, start_s: float, viewer: Viewer) -> ChoiceView:
    """start_s: the attempt's. The worker's clock starts when it receives the submit, some tenths of a millisecond
    later."""
    return ChoiceView(
        admitted_s=start_s + timeline.admitted_s if timeline.HasField("admitted_s") else None,
        first_token_s=start_s + timeline.first_token_s if timeline.HasField("first_token_s") else None,
        ended_s=start_s + timeline.ended_s,
        decode_steps=timeline.decode_steps,
        preemptions=timeline.preemptions,
        recomputed_tokens=timeline.recomputed_tokens,
        device_s=timeline.device_s,
        cached_tokens=timeline.cached_tokens,
        chunks=_chunks(timeline, start_s, viewer),
        gaps=[GapView(at_s=start_s + gap.at_s, duration_s=gap.duration_s) for gap in timeline.gaps],
        num_gaps=timeline.num_gaps,
    )


def _chunks(timeline: Timeline, start_s: float, viewer: Viewer) -> Iterator[ChunkView]:
    for chunk in timeline.chunks:
        shown = ChunkView(start_s=start_s + chunk.started_s, duration_s=chunk.duration_s, tokens=chunk.tokens)
        if viewer.is_operator:  # the step's composition tells of the requests of others
            shown.step_prefill_tokens = chunk.step_prefill_tokens
            shown.step_decode_tokens = chunk.step_decode_tokens
            shown.step_padding_tokens = chunk.step_padding_tokens
            shown.step_sequences = chunk.step_sequences
        yield shown
