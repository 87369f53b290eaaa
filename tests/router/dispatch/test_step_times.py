"""A router learns when the steps of a worker end from its session, and how long messages take from requests that have
ended."""

import asyncio

import pytest

from tests.router.cluster import cluster
from tests.router.fake_worker import FakeWorker
from trunkline.status import no_worker
from trunkline.v1.generation_pb2 import OutputChunk, SamplingParams
from trunkline.v1.worker_pb2 import SequenceOutput, SessionResponse, SessionWelcome, Submit, Timeline
from trunkline_router.workers.session import WorkerSession

PROMPT = list(range(5, 25))
AT_WORKER_S = 0.2  # from a submit to its first token


def not_expected(welcome: SessionWelcome) -> None:
    raise AssertionError("no welcome was sent")


async def test_an_output_of_a_step_tells_that_the_next_step_has_begun_and_a_refusal_tells_nothing() -> None:
    session = WorkerSession(clock_s=lambda: 50.0)
    session.steps.took(0.004)
    for _ in range(2):
        session.submit([Submit(sampling=SamplingParams(max_tokens=5))], [lambda output: True])
    refusal = SequenceOutput(handle=1, error=no_worker("the queue is full").to_proto())
    await session.receive(SessionResponse(outputs=[refusal]).SerializeToString(), not_expected)
    assert not session.steps.begun_s
    token = SequenceOutput(handle=2, chunk=OutputChunk(token_ids=[7]))
    await session.receive(SessionResponse(outputs=[token]).SerializeToString(), not_expected)
    assert list(session.steps.begun_s) == pytest.approx([49.996])


@pytest.mark.parametrize("choices", [1, 2])
async def test_what_a_first_token_took_beside_the_workers_time_is_the_delay(choices: int) -> None:
    """Of several choices it is not known whose output came first."""
    worker = FakeWorker("a", answer=None)
    async with cluster(worker) as router:
        call = asyncio.create_task(router.answer(PROMPT, n=choices))
        taken = [await worker.arrived.get() for _ in range(choices)]
        await asyncio.sleep(AT_WORKER_S)
        for choice in taken:
            choice.tokens(1)
        await asyncio.sleep(AT_WORKER_S)
        told = Timeline(admitted_s=0.0, first_token_s=AT_WORKER_S, ended_s=2 * AT_WORKER_S)
        for choice in taken:
            choice.tokens(1, finish=True, timeline=told)
        await call
        delay_s = router.connected(0).steps.delay_s
    if choices == 1:
        assert delay_s is not None
        assert 0.0 < delay_s < AT_WORKER_S, "a router on a busy machine is late, too"
    else:
        assert delay_s is None
