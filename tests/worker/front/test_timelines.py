"""The last output of a choice has its timeline, however the choice ends."""

import asyncio

import pytest

from tests.worker.front.front_rig import MODEL, PROMPT, TOKENIZER, Link, Reader
from tests.worker.front.timed_front import TimedFront
from trunkline.engine.v1.engine_pb2 import StepRecord
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.worker_pb2 import Submit
from trunkline_worker.front.cache_mirror import CacheMirror
from trunkline_worker.front.front import Front
from trunkline_worker.front.telemetry.timeline import TEXT_STRIDE, ChoiceTimeline, StepTimes


async def test_a_choice_that_the_engine_ends() -> None:
    timed = TimedFront()
    for n in range(4):
        timed.step(5 + n, finish=n == 3)
    timeline = timed.timeline
    assert (timeline.admitted_s, timeline.first_token_s, timeline.ended_s) == (0.25, 1.0, 4.0)
    assert (timeline.decode_steps, timeline.cached_tokens) == (3, 1)
    (chunk,) = timeline.chunks
    assert (chunk.started_s, chunk.duration_s, chunk.tokens) == (0.5, 0.5, len(PROMPT) - 1)
    assert timeline.device_s == pytest.approx(2.0), "it was alone in all four steps"
    assert timeline.received.seconds > 0


async def test_a_choice_that_the_front_ends_at_a_stop_string() -> None:
    *_, token_id = TOKENIZER.encode("Once upon").ids
    timed = TimedFront(stop=[TOKENIZER.decode([token_id]).strip()])
    timed.step(5)
    timed.step(token_id)
    assert timed.reader.news[-1].chunk.stop_string
    assert (timed.timeline.decode_steps, timed.timeline.ended_s) == (1, 2.0)
    assert timed.timeline.device_s == pytest.approx(1.0)


async def test_a_choice_that_breaks_off() -> None:
    timed = TimedFront()
    timed.step(5)
    timed.step(5, error=True)
    assert timed.reader.reasons == ["INTERNAL"]
    assert (timed.timeline.first_token_s, timed.timeline.decode_steps) == (1.0, 0)


async def test_a_choice_whose_deadline_passes_while_it_waits() -> None:
    broken = asyncio.Event()
    front, reader = Front(MODEL, TOKENIZER, CacheMirror(1)), Reader(on_news=broken.set)
    front.connect(Link())
    submit = Submit(handle=7, prompt_token_ids=PROMPT, sampling=SamplingParams(seed=1))
    submit.timeout.FromMilliseconds(1)
    front.submit(submit, reader)
    async with asyncio.timeout(60):
        await broken.wait()
    timeline = reader.news[-1].timeline
    assert reader.reasons == ["DEADLINE_EXCEEDED"]
    assert timeline.ended_s >= 0.001
    assert not timeline.HasField("admitted_s")
    assert not timeline.HasField("first_token_s")
    assert timeline.device_s == 0.0


async def test_the_time_to_make_text_is_estimated_from_few_outputs() -> None:
    timed = TimedFront()
    timed.tick_s = 1 / 1024
    for n in range(20):
        timed.step(5, finish=n == 19)
    assert timed.timeline.detokenize_s == pytest.approx(20 / 1024)


async def test_single_steps_are_sampled_with_what_they_computed() -> None:
    timed = TimedFront()
    for n in range(100):
        timed.step(5, finish=n == 99)
    steps = timed.timeline.sampled_steps
    assert [step.at_s for step in steps] == [33.0, 65.0, 97.0]
    for step in steps:
        assert (step.duration_s, step.decode_tokens, step.prefill_tokens, step.sequences) == (0.5, 1, 0, 1)


@pytest.mark.parametrize(
    ("outputs", "first", "stride", "count"), [(513, 32, 32, 16), (600, 64, 64, 9), (8000, 512, 512, 15)]
)
def test_the_sampled_steps_of_a_long_choice_are_spread_evenly(
    outputs: int, first: int, stride: int, count: int
) -> None:
    times, timeline = StepTimes(0.0), ChoiceTimeline(0.0, 0)
    for number in range(outputs):
        times.take(StepRecord(done_s=float(number), decode_tokens=1))
        if not number % TEXT_STRIDE:
            timeline.add_timed_output(number, 0.001, times)
    told = timeline.end(float(outputs), num_outputs=outputs, cached_tokens=0, times=times)
    assert [step.at_s for step in told.sampled_steps] == list(range(first, first + stride * count, stride))
    assert told.detokenize_s == pytest.approx(outputs * 0.001)
