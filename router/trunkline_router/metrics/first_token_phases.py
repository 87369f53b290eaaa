"""Where the time to a request's first token went. Pure."""

from trunkline.v1.worker_pb2 import Timeline
from trunkline_router.telemetry.request_record import AttemptRecord, RequestRecord

ADMISSION, TOKENIZE, PLACE, FAILOVER = "admission", "tokenize", "place", "failover"
WORKER_QUEUE, PREFILL, WORKER, DELIVERY = "worker_queue", "prefill", "worker", "delivery"
PHASES = (ADMISSION, TOKENIZE, PLACE, FAILOVER, WORKER_QUEUE, PREFILL, WORKER, DELIVERY)


def phases_of(record: RequestRecord) -> dict[str, float]:
    """Seconds by phase. They add up to the time to the first token; empty if there was none.

    FAILOVER: attempts that had no output. WORKER: at a worker that did not tell how it divides into WORKER_QUEUE and
    PREFILL. DELIVERY: the rest: network, event loops, and decoding the first token into text.
    """
    ttft_s = record.ttft_s
    first = next((attempt for attempt in record.attempts if attempt.first_output_s is not None), None)
    if ttft_s is None or first is None:
        return {}
    spent = {
        ADMISSION: 0.0 if record.admitted is None else record.admitted.duration_s,
        TOKENIZE: 0.0 if record.tokenized is None else record.tokenized.duration_s,
        PLACE: sum(
            placement.time.duration_s for placement in record.placements if placement.time.start_s <= first.started_s
        ),
        FAILOVER: sum(
            attempt.ended_s - attempt.started_s
            for attempt in record.attempts
            if attempt.ended_s is not None and attempt.started_s < first.started_s
        ),
    }
    spent |= _at_worker(first)
    left_s = ttft_s
    for phase in PHASES:  # clocks and records may disagree by microseconds: no phase gets more than what is left
        part_s = spent[phase] = min(max(0.0, spent.get(phase, 0.0)), left_s)
        left_s -= part_s
    spent[DELIVERY] = left_s
    return spent


def _at_worker(attempt: AttemptRecord) -> dict[str, float]:
    timeline = _first_timeline(attempt)
    if timeline is None:
        assert attempt.first_output_s is not None, "an attempt with output"
        return {WORKER: attempt.first_output_s - attempt.started_s}
    return {WORKER_QUEUE: timeline.admitted_s, PREFILL: timeline.first_token_s - timeline.admitted_s}


def _first_timeline(attempt: AttemptRecord) -> Timeline | None:
    """That of the choice with the first token."""
    told = [
        timeline
        for timeline in attempt.timelines
        if timeline.HasField("first_token_s") and timeline.HasField("admitted_s")
    ]
    return min(told, key=lambda timeline: timeline.first_token_s, default=None)
