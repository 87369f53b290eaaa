"""What a worker says of a choice's times is brought within what can be true."""

import resource
from math import inf, isfinite, nan
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.v1.worker_pb2 import Gap, PrefillChunk, SampledStep, Timeline
from trunkline_router.workers.output_claims import (
    MAX_CHUNKS,
    MAX_COUNT,
    MAX_GAPS,
    MAX_TIMELINE_BYTES,
    believed_timeline,
)

MOST_S, PROMPT_TOKENS = 3.0, 20

times = st.one_of(st.floats(), st.sampled_from([nan, inf, -inf, -1.0, 0.0, 1e308]), st.floats(0.0, MOST_S))
counts = st.integers(0, (1 << 32) - 1)
chunks = st.builds(PrefillChunk, started_s=times, duration_s=times, tokens=counts)
gaps = st.builds(Gap, at_s=times, duration_s=times)
timelines = st.builds(
    Timeline,
    admitted_s=st.none() | times,
    first_token_s=st.none() | times,
    ended_s=times,
    device_s=times,
    longest_gap_s=times,
    chunks=st.lists(chunks, max_size=4),
    gaps=st.lists(gaps, max_size=4),
    preemptions=counts,
    num_gaps=counts,
    cached_tokens=counts,
)


@given(timelines)
def test_times_are_in_order_and_within_the_attempt(told: Timeline) -> None:
    believed = believed_timeline(told, MOST_S, PROMPT_TOKENS)
    order = [0.0]
    if believed.HasField("admitted_s"):
        order.append(believed.admitted_s)
    if believed.HasField("first_token_s"):
        assert believed.HasField("admitted_s")
        order.append(believed.first_token_s)
    order += [believed.ended_s, MOST_S]
    assert order == sorted(order)
    assert all(map(isfinite, order))
    assert 0.0 <= believed.device_s <= believed.ended_s
    assert 0.0 <= believed.longest_gap_s <= believed.ended_s
    starts = [chunk.started_s for chunk in believed.chunks]
    assert starts == sorted(starts)
    assert all(0.0 <= chunk.started_s <= chunk.started_s + chunk.duration_s <= MOST_S for chunk in believed.chunks)
    assert all(0.0 <= gap.duration_s <= gap.at_s <= believed.ended_s for gap in believed.gaps)
    assert believed.preemptions <= MAX_COUNT
    assert believed.cached_tokens <= PROMPT_TOKENS


def test_what_can_be_true_is_believed() -> None:
    told = Timeline(
        admitted_s=0.5,
        first_token_s=1.0,
        ended_s=2.0,
        device_s=0.75,
        chunks=[PrefillChunk(started_s=0.5, duration_s=0.25, tokens=19, step_sequences=3)],
        gaps=[Gap(at_s=1.5, duration_s=0.25)],
        longest_gap_s=0.25,
        num_gaps=1,
        cached_tokens=1,
    )
    assert believed_timeline(told, MOST_S, PROMPT_TOKENS) == told
    assert believed_timeline(told, MOST_S, PROMPT_TOKENS) is not told, "it would keep its whole message in memory"


@pytest.mark.parametrize(
    "told",
    [
        Timeline(ended_s=1.0, chunks=[PrefillChunk()] * (MAX_CHUNKS + 1)),
        Timeline(ended_s=1.0, gaps=[Gap()] * (MAX_GAPS + 1)),
        Timeline(ended_s=1.0, sampled_steps=[SampledStep()] * MAX_TIMELINE_BYTES),
    ],
)
def test_what_is_larger_than_the_contract_allows_is_not_believed(told: Timeline) -> None:
    assert believed_timeline(told, MOST_S, PROMPT_TOKENS) == Timeline()


def test_what_the_contract_allows_is_believed() -> None:
    chunk = PrefillChunk(started_s=1.0, duration_s=1.0, tokens=2**32 - 1)
    for name in ("step_prefill_tokens", "step_decode_tokens", "step_padding_tokens", "step_sequences"):
        setattr(chunk, name, 2**32 - 1)
    told = Timeline(ended_s=1.0, chunks=[chunk] * MAX_CHUNKS, gaps=[Gap(at_s=1.0, duration_s=1.0)] * MAX_GAPS)
    told.received.GetCurrentTime()
    for field in Timeline.DESCRIPTOR.fields:
        if field.message_type is None:
            setattr(told, field.name, 2**32 - 1)
    assert told.ByteSize() < MAX_TIMELINE_BYTES
    assert len(believed_timeline(told, MOST_S, PROMPT_TOKENS).chunks) == MAX_CHUNKS


@pytest.mark.parametrize(
    "told",
    [
        Timeline(ended_s=1.0, chunks=[PrefillChunk()] * 31_000),
        Timeline(ended_s=1.0, chunks=[PrefillChunk()] * 2000),
        Timeline(ended_s=1.0, gaps=[Gap()] * 31_000),
        Timeline.FromString(b"\xfa\x01\xa0\x8d\x06" + bytes(100_000)),  # a field of a later version
    ],
    ids=["chunks", "small chunks", "gaps", "unknown field"],
)
def test_what_is_too_large_takes_no_memory(told: Timeline) -> None:
    """A thousand whole timelines would take 80 MB at least. What other threads of the process allocate meanwhile is
    far below the bound."""
    believed_timeline(told, MOST_S, PROMPT_TOKENS)
    before = resident_bytes()
    kept = [believed_timeline(told, MOST_S, PROMPT_TOKENS) for _ in range(1000)]
    assert resident_bytes() - before < 40 << 20, f"{len(kept)} timelines of {told.ByteSize()} bytes"


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
