"""A router says that it has no worker only after it has looked."""

import asyncio
import socket
from collections.abc import AsyncIterator
from random import Random

import grpc
import pytest

from tests.router.cluster import cluster, refusal, router_before, until
from tests.router.fake_worker import FakeWorker
from tests.router.membership import membership, serving
from trunkline.v1.inference_pb2 import GenerateRequest, ListModelsRequest, TokenizeRequest
from trunkline_router.discovery import Addresses, watch_name
from trunkline_router.pool import Pools
from trunkline_router.render_pool import RenderPool
from trunkline_router.tries import LOOK_APART_S, LOOK_AT_MOST_S, MOST_LOOKING, PATIENCE_SHARE, Look, Tries

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
        self.seen = False  # that it works
        self.look = Look([], lambda: [self.tries])

    async def run(self) -> None:
        while True:
            self.times += 1
            works = self.works
            await self.holds.wait()
            if works:
                break
            await self.tries.pause(LONG_S)
        self.seen = True
        self.tries.worked()
        self.change.set()

    async def found(self, time_left_s: float | None = None) -> bool:
        return await self.look.until(lambda: self.seen, lambda: self.change, time_left_s)


@pytest.fixture
async def tried() -> AsyncIterator[Tried]:
    one = Tried()
    running = asyncio.create_task(one.run())
    await until(lambda: one.times == 1)
    yield one
    running.cancel()


async def test_a_look_ends_the_pause_and_finds_what_has_come(tried: Tried) -> None:
    assert not await tried.found()
    assert tried.times == 2
    tried.works = True
    assert await tried.found()
    assert tried.times == 3
    assert await tried.found()


async def test_a_try_that_began_before_is_not_the_last_word(tried: Tried) -> None:
    tried.holds.clear()
    first = asyncio.create_task(tried.found())
    await until(lambda: tried.times == 2)  # it will fail: what it found was so before the second one asks
    tried.works = True
    second = asyncio.create_task(tried.found())
    await asyncio.sleep(0)
    tried.holds.set()
    assert await second
    await first


async def test_many_who_look_at_once_have_it_tried_once(tried: Tried) -> None:
    found = await asyncio.gather(*(tried.found() for _ in range(100)))
    assert not any(found)
    assert tried.times == 2
    started_s = asyncio.get_running_loop().time()
    for _ in range(3):
        assert not await tried.found()
    assert asyncio.get_running_loop().time() - started_s >= 2 * LOOK_APART_S
    assert tried.times == 5


async def test_no_more_look_than_may_be_held_in_memory(tried: Tried) -> None:
    tried.holds.clear()
    looking = [asyncio.create_task(tried.found()) for _ in range(MOST_LOOKING)]
    await asyncio.sleep(0)
    assert not await tried.found()
    assert not any(look.done() for look in looking)
    tried.works = True
    tried.holds.set()
    assert all(await asyncio.gather(*looking))
    assert await tried.found()


@pytest.mark.parametrize(("has_answered", "time_left_s", "most_s"), [
    (False, 0.2, PATIENCE_SHARE * 0.2), (False, None, LOOK_AT_MOST_S), (True, 3.0, PATIENCE_SHARE * 3.0)
])  # fmt: skip
async def test_a_try_that_does_not_end_leaves_a_request_the_time_to_hear_of_it(
    tried: Tried, has_answered: bool, time_left_s: float | None, most_s: float
) -> None:
    tried.holds.clear()
    tried.tries.has_answered = has_answered
    started_s = asyncio.get_running_loop().time()
    assert not await tried.found(time_left_s)
    assert asyncio.get_running_loop().time() - started_s >= most_s - 0.01


async def test_one_who_stops_looking_leaves_the_look_to_the_others(tried: Tried) -> None:
    tried.holds.clear()
    first, second = (asyncio.create_task(tried.found()) for _ in range(2))
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


async def test_a_worker_that_is_mute_takes_no_request_its_refusal() -> None:
    """It accepts connections and says nothing: a process that is stopped, a node that is gone."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        mute = FakeWorker("m", model="other")
        mute.port = listening.getsockname()[1]
        there = await FakeWorker("a").start()
        async with router_before(there, mute, expected=(True, False)) as router:
            refused = await refusal(router.generate("x", model="tinny", timeout_s=1.0))
            assert refused.reason == "MODEL_NOT_FOUND"
        await there.die()
        async with router_before(mute, expected=(False,)) as router:
            refused = await refusal(router.generate("x", timeout_s=1.0))
            assert (refused.reason, refused.retry_s is not None) == ("NO_WORKER", True)


async def test_a_worker_with_a_large_cache_is_looked_for_as_soon_as_it_is_lost() -> None:
    worker = FakeWorker("a")
    async with cluster(worker) as router:
        for _ in range(3):
            blocks = router.live(0).blocks
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
