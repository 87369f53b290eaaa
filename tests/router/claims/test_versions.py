"""Routers and workers of different versions of the contract."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.router.cluster import Cluster, router_before, tokens_of, until
from tests.router.fake_worker import WORKER_DRAINS, FakeWorker
from tests.router.previous_worker import PreviousWorker
from trunkline.grant import key_id
from trunkline.protocol import PROTOCOL_VERSION
from trunkline.v1.generation_pb2 import Lane
from trunkline.v1.worker_pb2 import GetModelResponse
from trunkline_router.workers.claims.model_check import WorkerUnusable, check_model

PROMPT = list(range(5, 30))


@asynccontextmanager
async def mixed() -> AsyncIterator[tuple[Cluster, PreviousWorker, FakeWorker]]:
    new = FakeWorker("new", answer=None)
    old = PreviousWorker("old", new.fingerprint)
    await old.start()
    await new.start()
    try:
        async with router_before(old, new, grant_key=b"k" * 32) as router:
            yield router, old, new
    finally:
        await old.stop()
        await new.die()


async def at_the_old_one(router: Cluster, old: PreviousWorker, new: FakeWorker) -> None:
    """From here on the new worker takes nothing, until it says otherwise."""
    new.send_load(draining=True)
    await until(lambda: not router.connected(1).accepts)


async def test_a_worker_of_the_previous_protocol_serves_a_new_router() -> None:
    async with mixed() as (router, old, new):
        await at_the_old_one(router, old, new)
        responses = await router.answer(PROMPT, n=2, lane=Lane.LANE_BATCH)
        assert responses[0].prompt.worker_id == "old"
        assert responses[-1].usage.completion_tokens == 4
        assert [(list(submit.prompt_token_ids), submit.lane) for submit in old.submits] == [(PROMPT, 3)] * 2


async def test_an_answer_goes_on_from_the_previous_protocol_to_this_one() -> None:
    async with mixed() as (router, old, new):
        await at_the_old_one(router, old, new)
        old.gives_up = True
        call = router.generate(PROMPT)
        await until(lambda: len(old.submits) == 1)
        new.send_load()
        resumed = await new.arrived.get()
        assert list(resumed.submit.resume.output_token_ids) == [0, 1]
        resumed.tokens(3, finish=True)
        assert tokens_of([response async for response in call]) == [0, 1, 2, 3, 4]


async def test_an_answer_goes_on_from_this_protocol_to_the_previous_one() -> None:
    async with mixed() as (router, old, new):
        new.cache_prompt(PROMPT)
        await until(lambda: len(router.connected(1).blocks) > 0)
        call = router.generate(PROMPT)
        begun = await new.arrived.get()
        begun.tokens(3)
        begun.fail(WORKER_DRAINS)
        assert tokens_of([response async for response in call]) == [0, 1, 2, 3, 4]
        (submit,) = old.submits
        assert (list(submit.resume.output_token_ids), submit.resume.text_bytes_sent) == ([0, 1, 2], 3)


def test_a_worker_of_the_previous_protocol_asks_for_no_proofs_and_serves_routers_without_its_key() -> None:
    lengths = {"context_length": 99, "kv_token_capacity": 99}
    own: dict[str, Any] = {"model": "m", "block_size": 16, "vocab_size": 9, **lengths}
    check_model(GetModelResponse(protocol_version=1, grant_key_id=key_id(b"k" * 32), **own))
    with pytest.raises(WorkerUnusable, match="--grant-key"):
        check_model(GetModelResponse(min_router_protocol=2, grant_key_id=key_id(b"k" * 32), **own))


async def test_a_worker_that_asks_for_newer_routers_is_left_alone_and_a_newer_one_that_does_not_is_used() -> None:
    ahead = FakeWorker("ahead", protocol_version=PROTOCOL_VERSION + 5)
    beyond = FakeWorker("beyond", protocol_version=PROTOCOL_VERSION + 5, min_router_protocol=PROTOCOL_VERSION + 1)
    await ahead.start()
    await beyond.start()
    try:
        async with router_before(ahead, beyond, expected=(True, False)) as router:
            for _ in range(4):
                assert (await router.answer(PROMPT))[0].prompt.worker_id == "ahead"
            await until(lambda: "upgrade routers" in router.links[1].problem)
    finally:
        await ahead.die()
        await beyond.die()
