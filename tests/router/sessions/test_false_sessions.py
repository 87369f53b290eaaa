"""A session with too many or false outputs is ended as soon as that is seen, and delays no other request until then."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from tests.router.cluster import cluster, until
from tests.router.fake_worker import FakeWorker
from tests.router.liar import innocents
from trunkline.v1.generation_pb2 import (
    FinishReason,
    OutputChunk,
    PromptReport,
    SamplingParams,
    TokenLogprob,
    TokenLogprobs,
)
from trunkline.v1.worker_pb2 import SequenceOutput, SessionResponse, SessionWelcome, Submit
from trunkline_router.workers.claims import FalseClaim
from trunkline_router.workers.output_claims import MOST_OUTPUT_BYTES
from trunkline_router.workers.session import FEW_OUTPUTS, PART_BYTES, WorkerSession
from trunkline_router.workers.session_outputs import FALSE_ANSWERS
from trunkline_runtime.wire import NotAMessage


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        (SessionResponse(outputs=[SequenceOutput(handle=1 << 60)] * 10_000), "never sent: handle"),
        (SessionResponse(outputs=[SequenceOutput()]), "never sent: handle 0"),
        (SessionResponse(welcome=SessionWelcome(worker_id="liar", epoch=1)), "opens its session twice"),
    ],
    ids=["unknown handles", "no handle", "a second welcome"],
)
async def test_a_session_that_makes_no_sense_ends_and_its_worker_is_named(said: SessionResponse, problem: str) -> None:
    good, liar = FakeWorker("good"), FakeWorker("liar")
    async with cluster(good, liar) as router:
        for session in liar._sessions:
            session.put_nowait(said)
        await asyncio.gather(innocents(router, "tiny"), until(lambda: problem in router.links[1].problem))


def submitted(session: WorkerSession, count: int) -> list[int]:
    sampling = SamplingParams(max_tokens=5)
    return session.submit([Submit(sampling=sampling, prompt_token_ids=[1]) for _ in range(count)], [bool] * count)


def answer(handle: int, token_id: int) -> SequenceOutput:
    return SequenceOutput(
        handle=handle, chunk=OutputChunk(token_ids=[token_id], finish_reason=FinishReason.FINISH_REASON_LENGTH)
    )


def test_one_answer_in_many_that_makes_no_sense_does_not_cost_the_others_their_worker() -> None:
    session = WorkerSession(vocab_size=10)
    for number, handle in enumerate(submitted(session, 500)):
        session.outputs.hand_out(answer(handle, 10 if number % 20 == 19 else 9))
    assert not session.num_open


def test_a_worker_whose_answers_often_make_no_sense_is_left() -> None:
    session = WorkerSession(vocab_size=10)
    handles = submitted(session, FALSE_ANSWERS)
    for handle in handles[:-1]:
        session.outputs.hand_out(answer(handle, 10))
    with pytest.raises(FalseClaim, match="token id 10 is not in"):
        session.outputs.hand_out(answer(handles[-1], 10))


def welcome(said: SessionWelcome) -> None:
    raise AssertionError("no welcome was sent")


async def turns_during(hearing: Coroutine[Any, Any, None]) -> int:
    """How often others have their turn until it is done."""
    turns = 0
    task = asyncio.create_task(hearing)
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    task.result()
    return turns


@pytest.mark.parametrize("text_characters", [0, 40, 20_000])
async def test_others_have_their_turn_while_a_long_message_is_taken_apart(text_characters: int) -> None:
    """A message is never parsed, nor its outputs handed out, in one piece: turns come by bytes and by outputs."""
    session = WorkerSession(vocab_size=10)
    handles = submitted(session, 10 * FEW_OUTPUTS if text_characters < 1000 else 100)
    outputs = [answer(handle, 1) for handle in handles]
    for output in outputs:
        output.chunk.text = "x" * text_characters
    raw = SessionResponse(outputs=outputs).SerializeToString()
    assert await turns_during(session.receive(raw, welcome)) >= max(len(outputs) / FEW_OUTPUTS, len(raw) / PART_BYTES)
    assert not session.num_open


def with_logprobs(handle: int, num_prompt: int, top: int) -> SequenceOutput:
    entry = TokenLogprob(token_id=(1 << 31) - 1, logprob=-1.5, rank=(1 << 32) - 1)  # as long as they get
    report = PromptReport(
        prompt_tokens=num_prompt, logprobs=[TokenLogprobs(chosen=entry, top=[entry] * top)] * num_prompt
    )
    return SequenceOutput(handle=handle, chunk=OutputChunk(token_ids=[1]), prompt=report)


@pytest.mark.parametrize("num_prompt", [100, 1000, 4000])
@pytest.mark.parametrize("top", [0, 1, 20])
async def test_a_prompt_s_log_probabilities_are_taken_where_they_were_asked_for_and_not_parsed_where_not(
    num_prompt: int, top: int
) -> None:
    heard: list[SequenceOutput] = []
    session = WorkerSession(vocab_size=10)
    prompt = [1] * num_prompt
    asked = Submit(sampling=SamplingParams(max_tokens=5, prompt_logprobs=top), prompt_token_ids=prompt)
    not_asked = Submit(sampling=SamplingParams(max_tokens=5), prompt_token_ids=prompt)
    first, second = session.submit([asked, not_asked], [heard.append] * 2)
    for handle in (first, second):
        raw = SessionResponse(outputs=[with_logprobs(handle, num_prompt, top)]).SerializeToString()
        await session.receive(raw, welcome)
    assert len(heard[0].prompt.logprobs) == num_prompt
    if len(raw) > MOST_OUTPUT_BYTES:
        assert f"one output has {len(raw)} bytes" in heard[1].error.message
        assert list(session._pending.abort_handles) == [second]


async def test_what_is_no_output_is_not_parsed_however_long_it_is() -> None:
    session = WorkerSession(vocab_size=10)
    (handle,) = submitted(session, 1)
    for raw in (
        SessionResponse(welcome=SessionWelcome(worker_id="x" * (1 << 20))).SerializeToString(),
        SessionResponse(outputs=[SequenceOutput(chunk=OutputChunk(text="x" * (1 << 20)))]).SerializeToString(),
        SessionResponse(
            outputs=[SequenceOutput(handle=9, chunk=OutputChunk(text="x" * PART_BYTES))]
        ).SerializeToString(),
        b"\x12\xff\xff\xff\x7f" + bytes(PART_BYTES),
        b"\x17" * (2 * PART_BYTES),
    ):
        with pytest.raises((FalseClaim, NotAMessage)):
            await session.receive(raw, welcome)
    session.abort([handle])
    late = SequenceOutput(handle=handle, chunk=OutputChunk(text="x" * (1 << 20)))
    await session.receive(SessionResponse(outputs=[late]).SerializeToString(), welcome)
