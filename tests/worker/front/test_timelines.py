"""The last output of a choice has its timeline, however the choice ends."""

import asyncio

import pytest

from tests.worker.front.front_rig import MODEL, PROMPT, TOKENIZER, Link, Reader
from trunkline.engine.v1.engine_pb2 import EngineOutput, EngineStep, StepRecord
from trunkline.v1.generation_pb2 import FinishReason, PromptReport, SamplingParams
from trunkline.v1.worker_pb2 import Submit, Timeline
from trunkline_worker.front.cache_mirror import CacheMirror
from trunkline_worker.front.front import Front

LENGTH = FinishReason.FINISH_REASON_LENGTH
START_S = 1000.0


class TimedFront:
    """A front whose clock a test sets, with one choice; steps take half a second on the device."""

    def __init__(self, **sampling: object) -> None:
        self.now_s = START_S
        self.front = Front(MODEL, TOKENIZER, CacheMirror(1), lambda: self.now_s)
        self.front.connect(Link())
        self.reader = Reader()
        submit = Submit(handle=7, request_id="r", prompt_token_ids=PROMPT)
        submit.sampling.CopyFrom(SamplingParams(seed=1, **sampling))  # type: ignore[arg-type]
        self.choice = self.front.submit(submit, self.reader)
        self.num_steps = 0

    def step(self, token_id: int, *, finish: bool = False, error: bool = False) -> None:
        """The engine ends a step, a second after the one before."""
        self.now_s += 1.0
        output = EngineOutput(handle=1, token_ids=[token_id], finish_reason=LENGTH if finish else 0)  # type: ignore[arg-type]
        record = StepRecord(done_s=self.now_s, device_s=0.5, decode_tokens=1, sequences=1, regular_tokens=1)
        step = EngineStep(outputs=[output], last_handle=1, record=record)
        if not self.num_steps:
            step.admitted_handles.append(1)
            step.admitted_s.append(self.now_s - 0.75)
            step.outputs[0].prompt.CopyFrom(PromptReport(prompt_tokens=len(PROMPT), cached_tokens=1))
            record.prefill_tokens, record.decode_tokens, record.regular_tokens = len(PROMPT) - 1, 0, 0
            record.chunk_handles.append(1)
            record.chunk_tokens.append(len(PROMPT) - 1)
            record.chunk_recomputed.append(0)
            step.record.CopyFrom(record)
        if error:
            step.outputs[0].error.reason = "INTERNAL"
            del step.outputs[0].token_ids[:]
        self.num_steps += 1
        self.front.on_step(step)

    @property
    def timeline(self) -> Timeline:
        assert not any(output.HasField("timeline") for output in self.reader.news[:-1]), "with the last output only"
        assert self.reader.news[-1].HasField("timeline")
        return self.reader.news[-1].timeline


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
    async with asyncio.timeout(5.0):
        await broken.wait()
    timeline = reader.news[-1].timeline
    assert reader.reasons == ["DEADLINE_EXCEEDED"]
    assert timeline.ended_s >= 0.001
    assert not timeline.HasField("admitted_s")
    assert not timeline.HasField("first_token_s")
    assert timeline.device_s == 0.0
