"""What a worker says of a choice that was aborted is taken once, and awaited for a short time."""

import asyncio

import pytest

from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.worker_pb2 import SequenceOutput, SessionResponse, SessionWelcome, Submit, Timeline
from trunkline_router.workers import session_outputs
from trunkline_router.workers.claims import FalseClaim
from trunkline_router.workers.session import WorkerSession
from trunkline_router.workers.session_outputs import IDLE_PER_HANDLE, MOST_AWAITED


def welcome(_: SessionWelcome) -> None:
    raise AssertionError


def opened() -> tuple[WorkerSession, int]:
    session = WorkerSession(vocab_size=10)
    (handle,) = session.submit([Submit(sampling=SamplingParams(max_tokens=1))], [lambda output: None])
    return session, handle


def answer(handle: int) -> bytes:
    output = SequenceOutput(handle=handle, timeline=Timeline(ended_s=2.0))
    return SessionResponse(outputs=[output]).SerializeToString()


async def test_the_answer_to_an_abort_reaches_its_sink_and_is_no_output_of_a_step() -> None:
    session, handle = opened()
    told: list[Timeline | None] = []
    assert session.abort([handle], told.append) == 1
    await session.receive(answer(handle), welcome)
    assert [timeline and timeline.ended_s for timeline in told] == [2.0]
    assert session.num_step_outputs == 0, "it does not show that the engine works"
    assert session.abort([handle], told.append) == 0, "it has ended"


async def test_a_worker_that_answers_again_and_again_is_disconnected() -> None:
    session, handle = opened()
    session.abort([handle], lambda timeline: None)
    for _ in range(IDLE_PER_HANDLE + 2):  # one that is awaited, and one that may be late
        await session.receive(answer(handle), welcome)
    with pytest.raises(FalseClaim):
        await session.receive(answer(handle), welcome)


async def test_a_worker_that_says_nothing_is_not_awaited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_outputs, "PATIENCE_S", 0.01)
    session, handle = opened()
    told, heard = asyncio.Event(), list[Timeline | None]()

    def hear(timeline: Timeline | None) -> None:
        heard.append(timeline)
        told.set()

    assert session.abort([handle], hear) == 1
    async with asyncio.timeout(60):
        await told.wait()
    await session.receive(answer(handle), welcome)
    assert heard == [None]


async def test_what_is_awaited_is_bounded_and_given_up_with_the_session() -> None:
    session = WorkerSession(vocab_size=10)
    submits = [Submit(sampling=SamplingParams(max_tokens=1)) for _ in range(MOST_AWAITED + 1)]
    handles = session.submit(submits, [lambda output: None] * len(submits))
    told: list[Timeline | None] = []
    assert session.abort(handles, told.append) == MOST_AWAITED
    session.outputs.close("the worker was lost")
    assert told == [None] * MOST_AWAITED
