"""A session that says much or false things is ended as soon as that is seen, and holds nobody up until then."""

import asyncio
from typing import Any

import pytest

from tests.router.cluster import cluster, until
from tests.router.fake_worker import FakeWorker
from tests.router.liar import innocents
from trunkline.v1.generation_pb2 import OutputChunk, SamplingParams
from trunkline.v1.worker_pb2 import SequenceOutput, SessionResponse, SessionWelcome, Submit
from trunkline_router.model_check import FalseClaim
from trunkline_router.session import FALSE_ANSWERS, FEW_OUTPUTS, WorkerSession


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
    return SequenceOutput(handle=handle, chunk=OutputChunk(token_ids=[token_id], finish_reason=2))


def test_one_answer_in_many_that_makes_no_sense_does_not_cost_the_others_their_worker() -> None:
    session = WorkerSession(vocab_size=10)
    for number, handle in enumerate(submitted(session, 500)):
        session._hand_out(answer(handle, 10 if number % 20 == 19 else 9))
    assert not session.num_open


def test_a_worker_whose_answers_often_make_no_sense_is_left() -> None:
    session = WorkerSession(vocab_size=10)
    handles = submitted(session, FALSE_ANSWERS)
    for handle in handles[:-1]:
        session._hand_out(answer(handle, 10))
    with pytest.raises(FalseClaim, match="token id 10 is not in"):
        session._hand_out(answer(handles[-1], 10))


async def test_others_have_their_turn_while_a_large_message_is_handed_out() -> None:
    session, turns = WorkerSession(vocab_size=10), 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    handles = submitted(session, 10 * FEW_OUTPUTS)
    task = asyncio.create_task(others())
    outputs: Any = [answer(handle, 1) for handle in handles]
    await session._hand_out_in_pieces(outputs)
    task.cancel()
    assert turns >= 9
    assert not session.num_open
