"""Conversations of one tenant do not hold up those of another one: real processes, and the real router before them."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from tests.router.cluster import cluster, refusal
from tests.router.fake_worker import FakeWorker
from tests.router.renderings import ECHO, SOMETIMES, chat, messages, rendered
from trunkline.status import RequestRefused
from trunkline.v1.inference_pb2 import GenerateRequest, TokenizeRequest
from trunkline_router.prompts.render_pool import BOUNDS, PROCESSES, PROCESSES_OF_ONE, RenderPool

LARGE = chat("x" * (1 << 20))
FLOOD = 600


@pytest.fixture
async def pool() -> AsyncIterator[RenderPool]:
    """All its processes have started."""
    made = RenderPool()
    await asyncio.gather(*(made.render(ECHO, chat(), tenant=str(name)) for name in range(PROCESSES)))
    assert len(made._idle) == PROCESSES
    yield made
    await made.close()


async def test_a_flood_of_large_conversations_is_bounded_and_delays_no_other_tenant(pool: RenderPool) -> None:
    rendered_of_hog = 0

    async def hog() -> None:
        nonlocal rendered_of_hog
        assert (await pool.render(ECHO, LARGE, tenant="hog")).num_characters == 3 + (1 << 20)
        rendered_of_hog += 1

    flood = asyncio.gather(*(hog() for _ in range(FLOOD)), return_exceptions=True)
    await asyncio.sleep(0)
    while not flood.done():
        before = rendered_of_hog
        assert (await pool.render(ECHO, chat("mine"), tenant="innocent")).text == "<s>mine"
        assert rendered_of_hog - before <= 2 * PROCESSES_OF_ONE, "a process is kept free"
    refused = [one for one in await flood if isinstance(one, RequestRefused)]
    assert rendered_of_hog + len(refused) == FLOOD
    assert BOUNDS.bytes_of_one - (1 << 20) <= rendered_of_hog << 20 <= BOUNDS.bytes_of_one
    assert all(one.reason == "OVERLOADED" and one.retry_delay_ms > 0 for one in refused)
    assert pool._places.is_idle


@pytest.mark.parametrize("tenants", [1, 3])
async def test_conversations_that_take_seconds_leave_a_process_to_other_tenants(pool: RenderPool, tenants: int) -> None:
    hanging = [
        asyncio.create_task(pool.render(SOMETIMES, chat("hang"), tenant=f"hog {n % tenants}"))
        for n in range(2 * PROCESSES * tenants)
    ]
    await asyncio.sleep(0)
    for _ in range(20):
        assert (await pool.render(SOMETIMES, chat("mine"), tenant="innocent")).text == "mine"
    assert not any(task.done() for task in hanging), "each takes its two seconds of a processor"
    for task in hanging:
        task.cancel()
    await asyncio.gather(*hanging, return_exceptions=True)
    assert pool._places.is_idle


async def test_a_conversation_that_gave_way_is_rendered_in_the_end() -> None:
    """Four tenants ask for something slow at once, and a fifth one for something quick."""
    pool = RenderPool(time_limit_s=60.0)
    slow = chat("x" * (1 << 20))
    pool._places._slice_s = 0.0  # everything is slow
    for name in range(PROCESSES):
        await pool.render(ECHO, chat(), tenant=str(name))
    tasks = [asyncio.create_task(pool.render(ECHO, slow, tenant=str(name % 8))) for name in range(4 * PROCESSES)]
    for _ in range(20):
        assert await rendered(pool, ECHO, chat("mine")) == "<s>mine"
    assert {(await task).num_characters for task in tasks} == {3 + (1 << 20)}
    assert pool._places.is_idle
    await pool.close()


async def test_a_tenants_flood_of_chats_reaches_no_other_ones_chat_or_token_ids() -> None:
    """Over the wire: what the router cannot hold is refused, and the innocent tenant never is."""
    innocent, hog = ((("x-trunkline-tenant", name),) for name in ("innocent", "hog"))
    small = TokenizeRequest(chat=messages())
    async with cluster(FakeWorker("a", context_length=1 << 16)) as router:
        await router.stub.Tokenize(small, metadata=innocent)
        flood = asyncio.gather(
            *(
                refusal(router.stub.Generate(GenerateRequest(chat=messages("x" * (1 << 20))), metadata=hog))
                for _ in range(100)
            )
        )
        answers = 0
        while not flood.done():
            assert (await router.stub.Tokenize(small, metadata=innocent)).token_ids
            assert await router.answer([5, 6, 7])
            answers += 1
        assert answers
        reasons = Counter(refused.reason for refused in await flood)
        assert set(reasons) <= {"OVERLOADED", "CONTEXT_LENGTH_EXCEEDED"}
        assert reasons["CONTEXT_LENGTH_EXCEEDED"], "rendered, and found to be too long"
