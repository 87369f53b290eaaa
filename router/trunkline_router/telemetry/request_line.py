"""The closing line of a request in the log: its whole timeline."""

from typing import Any

from trunkline.v1.worker_pb2 import Timeline
from trunkline_router.telemetry.request_record import GRANT, Interval, RequestRecord
from trunkline_runtime.log import get_logger

MILLISECONDS = 1e3


def log_end(record: RequestRecord) -> None:
    get_logger().info("request ended", **end_fields(record))


def end_fields(record: RequestRecord) -> dict[str, Any]:
    """The fields of the line. Times in milliseconds. What did not happen, or what most requests do not have, is left
    out."""
    fields = record.log_fields()
    fields["outcome"] = record.outcome
    if record.duration_s is not None:
        fields["duration_ms"] = _ms(record.duration_s)
    fields["endpoint"] = record.endpoint
    if record.lane:
        fields["lane"] = record.lane
    if record.model:
        fields["model"] = record.model
    if record.choices:
        fields["prompt_tokens"] = record.prompt_tokens
        fields["cached_tokens"] = record.cached_tokens
        fields["completion_tokens"] = record.completion_tokens
        fields["choices"] = record.choices
    if record.method == GRANT:
        fields["grants"] = record.grants
    _add_interval(fields, "tokenize_ms", record.tokenized)
    _add_interval(fields, "admission_ms", record.admitted)
    if record.placements:
        fields["route_ms"] = _ms(sum(placement.time.duration_s for placement in record.placements))
    if record.attempts:
        _add_worker_times(fields, record)
    if record.ttft_s is not None:
        fields["first_token_ms"] = _ms(record.ttft_s)
    if len(record.attempts) > 1 or (record.attempts and record.attempts[0].is_lost):
        fields["failovers"] = _failovers(record)
    if record.stalled_s:
        fields["stalled_ms"] = _ms(record.stalled_s)
    cost = record.cost
    if cost is not None:
        fields["cost"] = round(cost, 9)
    return fields


def _add_worker_times(fields: dict[str, Any], record: RequestRecord) -> None:
    """What the workers say: of the first choice in the last attempt, and sums of all."""
    timeline = record.last_timeline
    if timeline is None:
        return
    if timeline.HasField("admitted_s"):
        fields["queue_ms"] = _ms(timeline.admitted_s)
    if timeline.chunks:
        fields["prefill_ms"] = [_ms(chunk.duration_s) for chunk in timeline.chunks]
        fields["prefill_tokens"] = [chunk.tokens for chunk in timeline.chunks]
    everything = [timeline for attempt in record.attempts for timeline in attempt.timelines]
    fields["device_ms"] = _ms(sum(each.device_s for each in everything))
    _add_unusual(fields, timeline, everything)


def _add_unusual(fields: dict[str, Any], timeline: Timeline, everything: list[Timeline]) -> None:
    if num_gaps := sum(each.num_gaps for each in everything):
        fields["num_gaps"] = num_gaps
        fields["gaps_ms"] = [[_ms(gap.at_s), _ms(gap.duration_s)] for gap in timeline.gaps]
    if preemptions := sum(each.preemptions for each in everything):
        fields["preemptions"] = preemptions
        fields["recomputed_tokens"] = sum(each.recomputed_tokens for each in everything)


def _failovers(record: RequestRecord) -> list[dict[str, Any]]:
    """The workers that were lost or refused the request, with the silence until the next one went on."""
    told = []
    silences = record.silences
    for place, attempt in enumerate(record.attempts):
        if not attempt.is_lost:
            continue
        failover: dict[str, Any] = {"worker": attempt.worker, "reason": attempt.ended, "problem": attempt.problem}
        if (silence := silences.get(place)) is not None:
            failover["silence_ms"] = _ms(silence.duration_s)
        told.append(failover)
    return told


def _add_interval(fields: dict[str, Any], name: str, interval: Interval | None) -> None:
    if interval is not None:
        fields[name] = _ms(interval.duration_s)


def _ms(seconds: float) -> float:
    return round(seconds * MILLISECONDS, 1)
