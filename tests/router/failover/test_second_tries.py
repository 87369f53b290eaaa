"""A request that one worker loses or has no room for: others are asked before the client is."""

import asyncio

import grpc

from tests.router.cluster import Refusal, cluster, refusal, until
from tests.router.fake_worker import WORKER_DRAINS, FakeWorker
from trunkline.status import CODE_RESOURCE_EXHAUSTED, OVERLOADED, RequestRefused
from trunkline.v1.inference_pb2 import GenerateResponse
from trunkline_router.request.failover import FailoverLimits

PROMPT = list(range(10, 30))


async def test_a_request_without_output_yet_survives_its_worker_on_another_one() -> None:
    workers = {"a": FakeWorker("a", answer=None), "b": FakeWorker("b", answer=None)}
    async with cluster(*workers.values()) as router:
        call = router.generate(PROMPT)
        await until(lambda: any(worker.submits for worker in workers.values()))
        first = next(worker for worker in workers.values() if worker.submits)
        second = next(worker for worker in workers.values() if not worker.submits)
        await first.die()
        (await second.arrived.get()).tokens(2, finish=True)
        responses = [response async for response in call]
    assert responses[0].prompt.worker_id == second.worker_id
    assert responses[-1].usage.completion_tokens == 2
    assert first.submits[0].sampling.seed == second.submits[0].sampling.seed


async def test_a_request_that_every_worker_turns_away_is_refused_when_none_has_come_for_a_while() -> None:
    workers = [FakeWorker(name, answer=None) for name in "abc"]
    async with cluster(*workers, failover=FailoverLimits(patience_s=0.1)) as router:
        call = router.generate(PROMPT)

        async def turn_away(worker: FakeWorker) -> None:
            while True:
                (await worker.arrived.get()).fail(WORKER_DRAINS)

        turning = [asyncio.create_task(turn_away(worker)) for worker in workers]
        refused = await refusal(call)
        for task in turning:
            task.cancel()
        await asyncio.gather(*turning, return_exceptions=True)
    assert (refused.code, refused.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_WORKER")
    assert [len(worker.submits) for worker in workers] == [1, 1, 1], "each was asked, none twice"


def full(retry_delay_ms: int) -> RequestRefused:
    return RequestRefused(CODE_RESOURCE_EXHAUSTED, OVERLOADED, "the queue is full", retry_delay_ms=retry_delay_ms)


async def answered_by(*workers: FakeWorker, answers: dict[str, RequestRefused]) -> GenerateResponse | Refusal:
    """A request before workers that refuse it as `answers` say, or answer it."""

    async def serve(worker: FakeWorker) -> None:
        while True:
            choice = await worker.arrived.get()
            if worker.worker_id in answers:
                choice.fail(answers[worker.worker_id])
            else:
                choice.tokens(2, finish=True)

    async with cluster(*workers, failover=FailoverLimits(patience_s=0.1)) as router:
        workers[0].cache_prompt(PROMPT)  # so that it is asked first
        await until(lambda: len(router.connected(0).blocks) == len(PROMPT) // 4)
        serving = [asyncio.create_task(serve(worker)) for worker in workers]
        try:
            call = router.generate(PROMPT, n=2)
            first = await call.read()
            while (response := await call.read()) is not grpc.aio.EOF:
                first.usage.CopyFrom(response.usage)
            return first  # type: ignore[no-any-return]
        except grpc.aio.AioRpcError as error:
            return Refusal(error)
        finally:
            for task in serving:
                task.cancel()
            await asyncio.gather(*serving, return_exceptions=True)


async def test_a_request_that_one_worker_has_no_room_for_is_served_by_another() -> None:
    a, b = FakeWorker("a", answer=None), FakeWorker("b", answer=None)
    answer = await answered_by(a, b, answers={"a": full(500)})
    assert isinstance(answer, GenerateResponse)
    assert (answer.prompt.worker_id, answer.usage.completion_tokens) == ("b", 4)
    assert a.submits, "the holder of the prefix was asked first"


async def test_where_all_workers_are_full_the_client_may_come_back_when_the_first_one_has_room() -> None:
    workers = [FakeWorker(name, answer=None) for name in "abc"]
    refused = await answered_by(*workers, answers={"a": full(900), "b": full(300), "c": full(600)})
    assert isinstance(refused, Refusal)
    assert (refused.code, refused.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, OVERLOADED)
    assert refused.retry_s == 0.3
    assert all(worker.submits for worker in workers)


async def test_a_full_pool_is_not_asked_worker_by_worker_to_its_end() -> None:
    workers = [FakeWorker(name, answer=None) for name in "abcdefg"]
    refused = await answered_by(*workers, answers={worker.worker_id: full(500) for worker in workers})
    assert isinstance(refused, Refusal)
    assert refused.reason == OVERLOADED
    assert sum(bool(worker.submits) for worker in workers) == 4


async def test_a_full_worker_and_a_lost_one_make_an_overload() -> None:
    a, b = FakeWorker("a", answer=None), FakeWorker("b", answer=None)
    refused = await answered_by(a, b, answers={"a": full(500), "b": WORKER_DRAINS})
    assert isinstance(refused, Refusal)
    assert (refused.reason, refused.retry_s) == (OVERLOADED, 0.5)
