"""Conversations of one tenant do not hold up those of another one: real processes, and the real router before them."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from tests.router.cluster import cluster, refusal
from tests.router.fake_worker import FakeWorker
from tests.router.renderings import ECHO, SOMETIMES, chat, messages
from trunkline.status import RequestRefused
from trunkline.v1.inference_pb2 import GenerateRequest, TokenizeRequest
from trunkline_router.prompts.helper_pool import MAX_BYTES, SHORT_PROCESSES, Helpers

LARGE = chat("x" * (1 << 20))
FLOOD = 600


@pytest.fixture
async def helpers() -> AsyncIterator[Helpers]:
    """All its processes have started."""
    made = Helpers()
    await asyncio.gather(*(made.render(ECHO, chat(), account=str(name)) for name in range(SHORT_PROCESSES)))
    assert len(made.short._idle) == SHORT_PROCESSES
    yield made
    await made.close()


async def test_a_flood_of_large_conversations_is_bounded_and_delays_no_other_tenant(helpers: Helpers) -> None:
    rendered_of_hog = 0

    async def hog() -> None:
        nonlocal rendered_of_hog
        assert len(await helpers.render(ECHO, LARGE, account="hog")) == 3 + (1 << 20)
        rendered_of_hog += 1

    flood = asyncio.gather(*(hog() for _ in range(FLOOD)), return_exceptions=True)
    await asyncio.sleep(0)
    while not flood.done():
        assert helpers.short._num_busy <= SHORT_PROCESSES // 2, "places are kept free"
        assert await helpers.render(ECHO, chat("mine"), account="innocent") == "<s>mine"
    refused = [one for one in await flood if isinstance(one, RequestRefused)]
    assert rendered_of_hog + len(refused) == FLOOD
    assert MAX_BYTES // 2 - (2 << 20) <= rendered_of_hog << 20 <= MAX_BYTES // 2
    assert all(one.reason == "OVERLOADED" and one.retry_delay_ms > 0 for one in refused)
    assert not helpers.short._accounts


async def test_conversations_that_take_seconds_leave_a_process_to_other_tenants(helpers: Helpers) -> None:
    hanging = [
        asyncio.create_task(helpers.render(SOMETIMES, chat("hang"), account="hog")) for _ in range(2 * SHORT_PROCESSES)
    ]
    await asyncio.sleep(0)
    for _ in range(20):
        assert await helpers.render(SOMETIMES, chat("mine"), account="innocent") == "mine"
    assert not any(task.done() for task in hanging), "each takes its two seconds of a processor"
    for task in hanging:
        task.cancel()
    await asyncio.gather(*hanging, return_exceptions=True)
    assert not helpers.short._accounts


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
