"""A router says that it has no worker only after it has looked."""

import asyncio
import socket
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import grpc
import pytest

from tests.router.cluster import PATIENCE_S, cluster, refusal, router_before, until
from tests.router.fake_worker import FakeWorker
from tests.router.membership import membership, serving
from trunkline.v1.inference_pb2 import GenerateRequest, ListModelsRequest, TokenizeRequest
from trunkline.v1.worker_pb2 import SessionResponse
from trunkline_router.prompts.helper_pool import Helpers
from trunkline_router.workers import pool_search
from trunkline_router.workers.discovery import Addresses, watch_name
from trunkline_router.workers.pool import Pools
from trunkline_router.workers.pool_search import ConnectAttempts

LONG_S = 3600.0


async def test_a_worker_that_has_just_come_has_the_request_that_came_with_it() -> None:
    worker = FakeWorker("a")
    async with cluster(worker) as router:
        for _ in range(3):
            await worker.die()
            await router.until_workers(False)
            await until(lambda: "UNAVAILABLE" in router.links[0].problem)
            await worker.start()
            assert (await router.answer("x"))[-1].usage.completion_tokens


async def test_so_have_a_model_that_was_not_known_yet_and_questions_about_it() -> None:
    there, late = FakeWorker("a"), FakeWorker("b", model="late")
    for worker in (there, late):
        await worker.start()
    await late.die()  # its address is known, nobody listens there yet
    async with router_before(there, late, expected=(True, False)) as router:
        refused = await refusal(router.generate("x", model="late"))
        assert refused.reason == "MODEL_NOT_FOUND"
        await late.start()
        assert (await router.answer("x", model="late"))[0].prompt.worker_id == "b"
        await late.die()
        await router.until_workers(True, False)
        await late.start()
        assert (await router.stub.Tokenize(TokenizeRequest(text="x", model="late"))).token_ids
    for worker in (there, late):
        await worker.die()


async def test_a_name_is_looked_up_at_once_for_a_request_that_finds_nobody(helpers: Helpers) -> None:
    worker = await FakeWorker("a").start()
    known: Addresses | OSError = OSError("no such name")

    async def resolve(name: str, port: int) -> Addresses:
        if isinstance(known, OSError):
            raise known
        return known

    async def pause(delay_s: float) -> None:
        await lookup.pause(LONG_S)

    pools, lookup = Pools(Random(0)), ConnectAttempts()
    pools.lookups.append(lookup)
    source = watch_name("workers", 50061, Random(0), resolve, pause)
    async with membership(helpers, source, pools=pools), serving(pools) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(GenerateRequest(text="x")).read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        known = frozenset({worker.address})
        assert (await stub.ListModels(ListModelsRequest())).models
        assert await stub.Generate(GenerateRequest(text="x")).read()
    await worker.die()


async def test_a_worker_that_is_mute_takes_no_request_its_refusal() -> None:
    """It accepts connections and says nothing: a process that is stopped, a node that is gone."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        mute = FakeWorker("m", model="other")
        mute.port = listening.getsockname()[1]
        there = await FakeWorker("a").start()
        async with router_before(there, mute, expected=(True, False)) as router:
            refused = await refusal(router.generate("x", model="tinny", timeout_s=PATIENCE_S))
            assert refused.reason == "MODEL_NOT_FOUND"
        await there.die()
        async with router_before(mute, expected=(False,)) as router:
            refused = await refusal(router.generate("x", timeout_s=PATIENCE_S))
            assert (refused.reason, refused.retry_s is not None) == ("NO_WORKER", True)


async def test_a_worker_with_a_large_cache_is_looked_for_as_soon_as_it_is_lost() -> None:
    worker = FakeWorker("a")
    async with cluster(worker) as router:
        for _ in range(3):
            blocks = router.connected(0).blocks
            for start in range(0, 300_000, 1000):
                blocks.store(range(start + 1, start + 1001))
            await worker.die()
            await router.until_workers(False)
            await worker.start()
            assert (await router.answer("x"))[-1].usage.completion_tokens


async def test_a_model_that_nobody_has_asked_for_yet_is_known_and_others_are_served_meanwhile() -> None:
    there, late = FakeWorker("a"), FakeWorker("b", model="late")
    async with cluster(there, late) as router:
        await late.die()
        await router.until_workers(True, False)
        refused = [router.generate("x", model="late") for _ in range(50)]
        answers = await asyncio.gather(*(router.answer("x", model="tiny") for _ in range(20)))
        assert all(answer[-1].usage.completion_tokens for answer in answers)
        assert {(await refusal(call)).reason for call in refused} == {"NO_WORKER"}
        await late.start()
        assert (await router.answer("x", model="late"))[0].prompt.worker_id == "b"


async def test_a_worker_that_came_back_with_another_model_has_the_requests_for_it() -> None:
    there, changing = FakeWorker("a", model="other"), FakeWorker("b", model="m1")
    async with cluster(there, changing) as router:
        await changing.die()
        await router.until_workers(True, False)
        changing.model, changing.epoch = "m2", 2
        await changing.start()
        assert (await router.answer("x", model="m2"))[0].prompt.worker_id == "b"


async def test_a_worker_that_does_not_come_up_wholly_delays_no_refusal_of_another_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_search, "LOOK_AT_MOST_S", LONG_S)  # who looks for so long has no answer in time

    class Half(FakeWorker):
        async def Session(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[SessionResponse]:
            await asyncio.Event().wait()
            yield SessionResponse()

    there, half = FakeWorker("a"), Half("b", model="other")
    for worker in (there, half):
        await worker.start()
    async with router_before(there, half, expected=(True, False)) as router:
        await until(lambda: half.asked > 0)
        await there.die()
        await router.until_workers(False, False)
        assert (await refusal(router.generate("x", model="tiny"))).reason == "NO_WORKER"
    await half.die()
