"""Checks what a worker says of a choice's timeline. It decides nothing, so what cannot be true is corrected."""

from collections.abc import Iterable
from operator import attrgetter

from trunkline.v1.worker_pb2 import Gap, PrefillChunk, Timeline

MAX_CHUNKS, MAX_GAPS = 64, 16  # what the contract allows
MAX_COUNT = 1 << 20  # of steps, preemptions and gaps of one choice


def believed_timeline(told: Timeline, most_s: float, prompt_tokens: int) -> Timeline:
    """Returns a copy that is bounded in size, whose times are in order and no longer than the attempt was. `received`
    is left out: the worker's clock may be wrong.

    most_s: since the choice was sent to the worker. prompt_tokens: of its prompt
    """
    end_s = within(told.ended_s, 0.0, most_s)
    believed = Timeline(
        ended_s=end_s,
        decode_steps=min(told.decode_steps, MAX_COUNT),
        longest_gap_s=within(told.longest_gap_s, 0.0, end_s),
        preemptions=min(told.preemptions, MAX_COUNT),
        recomputed_tokens=min(told.recomputed_tokens, MAX_COUNT),
        device_s=within(told.device_s, 0.0, end_s),
        cached_tokens=min(told.cached_tokens, prompt_tokens),
        num_gaps=min(told.num_gaps, MAX_COUNT),
    )
    if told.HasField("admitted_s"):
        believed.admitted_s = within(told.admitted_s, 0.0, end_s)
        if told.HasField("first_token_s"):
            believed.first_token_s = within(told.first_token_s, believed.admitted_s, end_s)
    if told.chunks:
        believed.chunks.extend(_chunks(told.chunks[:MAX_CHUNKS], end_s))
    if told.gaps:
        believed.gaps.extend(_gaps(told.gaps[:MAX_GAPS], end_s))
    return believed


def within(value: float, least: float, most: float) -> float:
    """Returns the value within bounds; `least` for what is not a number."""
    return min(value, most) if value >= least else least


def _chunks(told: Iterable[PrefillChunk], end_s: float) -> list[PrefillChunk]:
    chunks = []
    for chunk in told:
        started_s = within(chunk.started_s, 0.0, end_s)
        chunks.append(
            PrefillChunk(
                started_s=started_s,
                duration_s=within(chunk.duration_s, 0.0, end_s - started_s),
                tokens=chunk.tokens,
                step_prefill_tokens=chunk.step_prefill_tokens,
                step_decode_tokens=chunk.step_decode_tokens,
                step_padding_tokens=chunk.step_padding_tokens,
                step_sequences=chunk.step_sequences,
            )
        )
    chunks.sort(key=attrgetter("started_s"))
    return chunks


def _gaps(told: Iterable[Gap], end_s: float) -> list[Gap]:
    gaps = []
    for gap in told:
        at_s = within(gap.at_s, 0.0, end_s)
        gaps.append(Gap(at_s=at_s, duration_s=within(gap.duration_s, 0.0, at_s)))
    gaps.sort(key=attrgetter("at_s"))
    return gaps
