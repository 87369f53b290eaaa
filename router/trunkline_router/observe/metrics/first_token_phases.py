"""Where the time to a request's first token went. Pure."""

from collections.abc import Iterator
from operator import attrgetter

from trunkline.v1.worker_pb2 import Timeline
from trunkline_router.record.request_record import AttemptRecord, RequestRecord

ADMISSION, TOKENIZE, PLACE, FAILOVER = "admission", "tokenize", "place", "failover"
WORKER_QUEUE, PREFILL, WORKER, DELIVERY = "worker_queue", "prefill", "worker", "delivery"


def phases_of(record: RequestRecord) -> list[tuple[str, float]]:
    """Phases that took time, in order, with their seconds, which add up to the time to the first token; empty if there
    was no token.

    FAILOVER: attempts that had no output. WORKER: at a worker that did not tell how it divides into WORKER_QUEUE and
    PREFILL. DELIVERY: the rest: network, event loops, and decoding the first token into text.
    """
    left_s = record.ttft_s
    first = next((attempt for attempt in record.attempts if attempt.first_output_s is not None), None)
    if left_s is None or first is None:
        return []
    phases = []
    for phase, part_s in (*_at_router(record, first), *_at_worker(first)):
        # Clocks and workers may disagree by microseconds: no phase gets more than what is left.
        part_s = min(part_s, left_s)
        if part_s > 0.0:
            phases.append((phase, part_s))
            left_s -= part_s
    phases.append((DELIVERY, left_s))
    return phases


def _at_router(record: RequestRecord, first: AttemptRecord) -> Iterator[tuple[str, float]]:
    if record.admitted is not None:
        yield ADMISSION, record.admitted.duration_s
    if record.tokenized is not None:
        yield TOKENIZE, record.tokenized.duration_s
    begun_s = first.started_s
    yield PLACE, sum([made.time.duration_s for made in record.placements if made.time.start_s <= begun_s])
    for attempt in record.attempts:
        if attempt is first:
            break
        if attempt.ended_s is not None:
            yield FAILOVER, attempt.ended_s - attempt.started_s


def _at_worker(attempt: AttemptRecord) -> Iterator[tuple[str, float]]:
    timeline = _first_timeline(attempt)
    if timeline is not None:
        yield WORKER_QUEUE, timeline.admitted_s
        yield PREFILL, timeline.first_token_s - timeline.admitted_s
    elif attempt.first_output_s is not None:
        yield WORKER, attempt.first_output_s - attempt.started_s


def _first_timeline(attempt: AttemptRecord) -> Timeline | None:
    """That of the choice with the first token."""
    told = [timeline for timeline in attempt.timelines if timeline.HasField("first_token_s")]
    return min(told, key=attrgetter("first_token_s")) if len(told) > 1 else told[0] if told else None
