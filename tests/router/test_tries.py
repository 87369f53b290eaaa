"""A router says that it has no worker only after it has looked."""

import asyncio
from random import Random

import grpc
import pytest

from tests.router.cluster import cluster, refusal, router_before, until
from tests.router.fake_worker import FakeWorker
from tests.router.test_discovery import membership, serving
from trunkline.v1.inference_pb2 import GenerateRequest, ListModelsRequest, TokenizeRequest
from trunkline_router.discovery import Addresses, watch_name
from trunkline_router.pool import Pools
from trunkline_router.render_pool import RenderPool
from trunkline_router.tries import LOOK_APART_S, Look, Tries

LONG_S = 3600.0


class Tried:
    """Something that is tried with long pauses, and works from a moment on."""

    def __init__(self) -> None:
        self.tries = Tries()
        self.times = 0
        self.works = False
        self.change = asyncio.Event()
        self.holds = asyncio.Event()  # a try takes until this is set
        self.holds.set()

    async def run(self) -> None:
        while True:
            self.times += 1
            await self.holds.wait()
            if self.works:
                break
            await self.tries.pause(LONG_S)
        self.tries.worked()
        self.change.set()

    def look(self, at_most_s: float = 5.0) -> Look:
        return Look([], lambda: [self.tries], at_most_s=at_most_s)


async def test_a_look_ends_the_pause_and_finds_what_has_come() -> None:
    tried = Tried()
    running = asyncio.create_task(tried.run())
    await until(lambda: tried.times == 1)
    look = tried.look()
    assert not await look.until(lambda: tried.works, lambda: tried.change)
    assert tried.times == 2
    tried.works = True
    assert await look.until(lambda: tried.works and running.done(), lambda: tried.change)
    assert tried.times == 3
    assert await look.until(lambda: True, lambda: tried.change)


async def test_many_who_look_at_once_have_it_tried_once() -> None:
    tried = Tried()
    running = asyncio.create_task(tried.run())
    look = tried.look()
    found = await asyncio.gather(*(look.until(lambda: False, lambda: tried.change) for _ in range(100)))
    assert not any(found)
    assert tried.times <= 2
    started_s = asyncio.get_running_loop().time()
    for _ in range(3):
        await look.until(lambda: False, lambda: tried.change)
    assert asyncio.get_running_loop().time() - started_s >= 2 * LOOK_APART_S
    assert tried.times <= 5
    running.cancel()


async def test_a_try_that_does_not_end_is_not_waited_for_longer_than_allowed() -> None:
    tried = Tried()
    tried.holds.clear()
    running = asyncio.create_task(tried.run())
    assert not await tried.look(at_most_s=0.05).until(lambda: False, lambda: tried.change)
    assert tried.times == 1
    running.cancel()


async def test_one_who_stops_looking_leaves_the_look_to_the_others() -> None:
    tried = Tried()
    tried.holds.clear()
    running = asyncio.create_task(tried.run())
    look = tried.look()
    first, second = (asyncio.create_task(look.until(lambda: running.done(), lambda: tried.change)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    tried.works = True
    tried.holds.set()
    assert await second


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


async def test_a_name_is_looked_up_at_once_for_a_request_that_finds_nobody(renderers: RenderPool) -> None:
    worker = await FakeWorker("a").start()
    known: Addresses | OSError = OSError("no such name")

    async def resolve(name: str, port: int) -> Addresses:
        if isinstance(known, OSError):
            raise known
        return known

    async def pause(delay_s: float) -> None:
        await lookup.pause(LONG_S)

    pools, lookup = Pools(Random(0)), Tries()
    pools.lookups.append(lookup)
    source = watch_name("workers", 50061, Random(0), resolve, pause)
    async with membership(renderers, source, pools=pools), serving(pools) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(GenerateRequest(text="x")).read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        known = frozenset({worker.address})
        assert (await stub.ListModels(ListModelsRequest())).models
        assert await stub.Generate(GenerateRequest(text="x")).read()
    await worker.die()
