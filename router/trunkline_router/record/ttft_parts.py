"""Where a request's time to first token went. Pure: made from its record alone.

Each stage claims its interval. What is left is "network": the ways between client, router and worker, and their event
loops.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from trunkline.v1.worker_pb2 import PrefillChunk, Timeline
from trunkline_router.record.request_record import COMPLETE, GRANTED, AttemptRecord, Interval, RequestRecord

ADMISSION, TOKENIZER, PLACEMENT, QUEUE, KV_PRESSURE = "admission", "tokenizer", "placement", "queue", "kv_pressure"
PREFILL, DECODE_INTERFERENCE, FAILOVER = "prefill", "decode_interference", "failover"
STALLED_CLIENT, WORKER, NETWORK = "stalled_client", "worker", "network"
LEAST_CAUSE_S = 1e-3  # a shorter part is no cause


class Part(NamedTuple):
    """A part of the time, in seconds since the request's arrival."""

    part: str
    start_s: float
    end_s: float
    note: str = ""

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


def ttft_parts(record: RequestRecord, end_s: float) -> list[Part]:
    """Returns the parts of the time to first token; of the whole time if there was no first token. In order, without
    overlaps or holes.

    end_s: when the request ended, or the time now
    """
    return _joined(_parts(record, end_s))


def cause_of(record: RequestRecord, end_s: float) -> str:
    """Returns the kind of part that took the most of the time to first token, "" if none took a millisecond."""
    return causes_of(record, end_s)[0]


def causes_of(record: RequestRecord, end_s: float) -> tuple[str, str]:
    """Returns what cause_of() does, and what the request waited for in a worker's queue before its first token:
    KV_PRESSURE for KV blocks, QUEUE for requests before it, "" if it did not wait for a millisecond."""
    times_s: dict[str, float] = {}
    for part in _parts(record, end_s):
        times_s[part.part] = times_s.get(part.part, 0.0) + part.duration_s
    is_stalled = record.stalled_s > max(LEAST_CAUSE_S, record.ttft_s or 0.0)
    return STALLED_CLIENT if is_stalled else _longest(times_s, times_s), _longest(times_s, (QUEUE, KV_PRESSURE))


def _longest(times_s: Mapping[str, float], kinds: Iterable[str]) -> str:
    """Returns the kind that took the longest, "" if none took a millisecond."""
    longest = max(kinds, key=lambda kind: times_s.get(kind, 0.0), default="")
    return longest if times_s.get(longest, 0.0) >= LEAST_CAUSE_S else ""


def _parts(record: RequestRecord, end_s: float) -> Iterator[Part]:
    until_s = end_s if record.first_token_s is None else record.first_token_s
    claims = sorted(_claims(record, end_s), key=attrgetter("start_s"))
    return _without_holes(claims, until_s - record.started_s)


def _claims(record: RequestRecord, end_s: float) -> Iterator[Part]:
    zero_s = record.started_s
    searched = record.searched
    if searched is not None and searched.duration_s >= LEAST_CAUSE_S:
        yield _in_router(PLACEMENT, searched, zero_s, "no worker of its model was ready")
    if record.admitted is not None:
        yield _in_router(ADMISSION, record.admitted, zero_s)
    if record.tokenized is not None:
        yield _in_router(TOKENIZER, record.tokenized, zero_s)
    for placement in record.placements:
        yield _in_router(PLACEMENT, placement.time, zero_s)
    for attempt in record.attempts:
        output_s, ended_s = attempt.first_output_s, attempt.ended_s
        attempt_end_s = output_s if output_s is not None else ended_s if ended_s is not None else end_s
        decision = record.placement_of(attempt)
        waits_for_kv = decision is not None and decision.waits_for_kv
        yield from _of_attempt(attempt, zero_s, attempt_end_s - zero_s, waits_for_kv=waits_for_kv)
        if output_s is not None:
            break


def _in_router(kind: str, time: Interval, zero_s: float, note: str = "") -> Part:
    return Part(kind, time.start_s - zero_s, time.end_s - zero_s, note)


def _of_attempt(attempt: AttemptRecord, zero_s: float, end_s: float, *, waits_for_kv: bool) -> Iterator[Part]:
    """The parts of the time on one worker, up to the first output."""
    start_s = attempt.started_s - zero_s
    if attempt.first_output_s is None and attempt.is_lost:
        yield Part(FAILOVER, start_s, end_s, f"{attempt.worker}: {attempt.ended}")
        return
    first = first_timeline(attempt.timelines)
    if first is None:
        yield Part(WORKER, start_s, end_s, f"{attempt.worker}: {_untold(attempt)}")
        return
    queue = Part(
        KV_PRESSURE if waits_for_kv else QUEUE,
        start_s,
        start_s + (first.admitted_s if first.HasField("admitted_s") else first.ended_s),
        attempt.worker + (": the KV pool was predicted to be full" if waits_for_kv else ""),
    )
    yield queue
    yield from _of_prompt(first, start_s, queue.end_s)


def _untold(attempt: AttemptRecord) -> str:
    """Why there is no timeline, in words. A worker sends that of a choice when the choice ends."""
    if attempt.ended_s is None:
        return "the request still runs there"
    if attempt.is_lost:
        return f"the worker was lost later ({attempt.ended}), before it told what it had done"
    if attempt.ended == GRANTED:
        return "it answers the client directly"
    if attempt.ended == COMPLETE:
        return "the worker sent none"
    return "the request was ended there, and the worker did not answer within a second"


def _of_prompt(first: Timeline, start_s: float, admitted_s: float) -> Iterator[Part]:
    """The time from the admission to the first token, by kind: chunks of many requests alternate in it, so the parts
    are sums. Those of the choice's own tokens come first."""
    end_s = start_s + (first.first_token_s if first.HasField("first_token_s") else first.ended_s)
    chunks = [chunk for chunk in first.chunks if start_s + chunk.started_s < end_s]
    if not chunks:
        return
    own_s = sum(chunk.duration_s * own_share(chunk) for chunk in chunks)
    others_s = sum(chunk.duration_s for chunk in chunks) - own_s
    prefill_s = min(admitted_s + own_s, end_s)
    yield Part(PREFILL, admitted_s, prefill_s, f"{sum(chunk.tokens for chunk in chunks)} tokens, {len(chunks)} chunks")
    if first.preemptions and first.recomputed_tokens:
        shared_s = min(prefill_s + others_s, end_s)
        yield Part(DECODE_INTERFERENCE, prefill_s, shared_s, "tokens of others in its steps")
        yield Part(KV_PRESSURE, shared_s, end_s, f"preempted {first.preemptions} times")
    else:
        yield Part(DECODE_INTERFERENCE, prefill_s, end_s, "tokens of others in its steps, and steps without it")


def own_share(chunk: PrefillChunk) -> float:
    """Returns the choice's share of the tokens in a step."""
    tokens = chunk.step_prefill_tokens + chunk.step_decode_tokens
    return min(1.0, chunk.tokens / tokens) if tokens else 1.0


def first_timeline(timelines: Sequence[Timeline]) -> Timeline | None:
    """Returns the timeline of the choice that had the first token; None if there is no timeline."""
    return min(
        timelines,
        key=lambda line: line.first_token_s if line.HasField("first_token_s") else float("inf"),
        default=None,
    )


def _without_holes(claims: Sequence[Part], end_s: float) -> Iterator[Part]:
    at_s = 0.0
    for claim in claims:
        start_s, claim_end_s = max(at_s, claim.start_s), min(end_s, claim.end_s)
        if claim_end_s <= start_s:
            continue
        if start_s > at_s:
            yield Part(NETWORK, at_s, start_s)
        is_whole = start_s == claim.start_s and claim_end_s == claim.end_s
        yield claim if is_whole else Part(claim.part, start_s, claim_end_s, claim.note)
        at_s = claim_end_s
    if end_s > at_s:
        yield Part(NETWORK, at_s, end_s)


def _joined(parts: Iterable[Part]) -> list[Part]:
    """Joins neighbours of a kind."""
    joined: list[Part] = []
    for part in parts:
        if joined and joined[-1].part == part.part:
            joined[-1] = Part(part.part, joined[-1].start_s, part.end_s, joined[-1].note or part.note)
        else:
            joined.append(part)
    return joined
