"""The closing line of a request in the log: its whole timeline."""

from typing import Any

from trunkline.v1.worker_pb2 import Timeline
from trunkline_router.record.request_record import GRANT, RequestRecord
from trunkline_runtime.log import get_logger

TENTHS = 1e4  # of milliseconds in a second

_LOG = get_logger()  # once, because there is a line for each request


def log_end(record: RequestRecord) -> None:
    _LOG.info("request ended", **end_fields(record))


def end_fields(record: RequestRecord) -> dict[str, Any]:
    """The fields of the line. Times in milliseconds. What did not happen, or what most requests do not have, is left
    out."""
    fields = record.log_fields()
    fields["tenant"], fields["outcome"], fields["endpoint"] = record.tenant, record.outcome, record.endpoint
    if record.ended_s is not None:
        fields["duration_ms"] = _ms(record.ended_s - record.started_s)
    if record.lane:
        fields["lane"] = record.lane
    if record.model:
        fields["model"] = record.model
    if record.choices:
        fields["prompt_tokens"], fields["choices"] = record.prompt_tokens, record.choices
        fields["cached_tokens"], fields["completion_tokens"] = record.cached_tokens, record.completion_tokens
    if record.method == GRANT:
        fields["grants"] = record.grants
    for name, interval in (("tokenize_ms", record.tokenized), ("admission_ms", record.admitted)):
        if interval is not None:
            fields[name] = _ms(interval.end_s - interval.start_s)
    if record.placements:
        fields["route_ms"] = _ms(sum([placed.time.end_s - placed.time.start_s for placed in record.placements]))
    if record.first_token_s is not None:
        fields["first_token_ms"] = _ms(record.first_token_s - record.started_s)
    if record.stalled_s:
        fields["stalled_ms"] = _ms(record.stalled_s)
    if record.attempts:
        _add_attempts(fields, record)
    return fields


def _add_attempts(fields: dict[str, Any], record: RequestRecord) -> None:
    """What the workers say: of the first choice in the last attempt that they say anything of, and sums of all."""
    attempts = record.attempts
    timelines = [timeline for attempt in attempts for timeline in attempt.timelines]
    if timelines:
        _add_timeline(fields, next(attempt.timelines[0] for attempt in reversed(attempts) if attempt.timelines))
        fields["device_ms"] = _ms(sum([timeline.device_s for timeline in timelines]))
        if num_gaps := sum([timeline.num_gaps for timeline in timelines]):
            fields["num_gaps"] = num_gaps
        if preemptions := sum([timeline.preemptions for timeline in timelines]):
            fields["preemptions"] = preemptions
            fields["recomputed_tokens"] = sum([timeline.recomputed_tokens for timeline in timelines])
    if len(attempts) > 1 or attempts[0].is_lost:
        fields["failovers"] = _failovers(record)
    cost = record.cost
    if cost is not None:
        fields["cost"] = round(cost, 9)


def _add_timeline(fields: dict[str, Any], timeline: Timeline) -> None:
    fields["queue_ms"] = _ms(timeline.admitted_s if timeline.HasField("admitted_s") else timeline.ended_s)
    chunks = timeline.chunks
    if chunks:
        fields["prefill_ms"] = [_ms(chunk.duration_s) for chunk in chunks]
        fields["prefill_tokens"] = [chunk.tokens for chunk in chunks]
    if timeline.num_gaps:
        fields["gaps_ms"] = [[_ms(gap.at_s), _ms(gap.duration_s)] for gap in timeline.gaps]


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


def _ms(seconds: float) -> float:
    """Milliseconds with one digit after the point. round() takes twice as long."""
    return int(seconds * TENTHS + 0.5) / 10
