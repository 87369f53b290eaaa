"""Routers and workers of different versions of the contract."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.router.cluster import Cluster, router_before, tokens_of, until
from tests.router.fake_worker import WORKER_DRAINS, FakeWorker
from trunkline.grant import GrantKeys, key_id
from trunkline.protocol import OLDEST_PROTOCOL, PROTOCOL_VERSION
from trunkline.v1.worker_pb2 import GetModelResponse
from trunkline_router.workers.claims import WorkerUnusable, check_model

PROMPT = list(range(5, 30))
KEY = b"k" * 32
MODEL: dict[str, Any] = {
    "model": "m",
    "block_size": 16,
    "vocab_size": 9,
    "context_length": 99,
    "kv_token_capacity": 99,
}


@asynccontextmanager
async def before(*workers: FakeWorker, serve: tuple[bool, ...]) -> AsyncIterator[Cluster]:
    for worker in workers:
        await worker.start()
    try:
        async with router_before(*workers, expected=serve) as router:
            yield router
    finally:
        for worker in workers:
            await worker.die()


@pytest.mark.parametrize(("first", "second"), [("old", "new"), ("new", "old")])
async def test_an_answer_goes_on_between_this_protocol_and_the_previous_one(first: str, second: str) -> None:
    workers = {
        "old": FakeWorker("old", answer=None, protocol_version=OLDEST_PROTOCOL),
        "new": FakeWorker("new", answer=None),
    }
    workers[first].cache_prompt(PROMPT)
    async with before(*workers.values(), serve=(True, True)) as router:
        await until(lambda: any(len(router.connected(place).blocks) > 0 for place in range(2)))
        call = router.generate(PROMPT)
        begun = await workers[first].arrived.get()
        begun.tokens(3)
        begun.fail(WORKER_DRAINS)
        resumed = await workers[second].arrived.get()
        assert list(resumed.submit.resume.output_token_ids) == [0, 1, 2]
        resumed.tokens(2, finish=True)
        assert tokens_of([response async for response in call]) == [0, 1, 2, 3, 4]


async def test_a_worker_of_an_older_protocol_is_set_aside_and_the_problem_says_why() -> None:
    old, new = FakeWorker("old", protocol_version=OLDEST_PROTOCOL - 1), FakeWorker("new")
    async with before(old, new, serve=(False, True)) as router:
        for _ in range(4):
            assert (await router.answer(PROMPT))[0].prompt.worker_id == "new"
        await until(lambda: f"speaks protocol {OLDEST_PROTOCOL - 1}" in router.links[0].problem)
        assert f"needs {OLDEST_PROTOCOL} or a later one: upgrade the worker" in router.links[0].problem
        assert not old.submits


def test_a_worker_with_a_grant_key_serves_routers_with_the_same_key_alone() -> None:
    model = GetModelResponse(protocol_version=PROTOCOL_VERSION, grant_key_ids=[key_id(KEY)], **MODEL)
    check_model(model, GrantKeys(KEY))
    for keys in (GrantKeys(), GrantKeys(b"other" * 8)):
        with pytest.raises(WorkerUnusable, match="--grant-key"):
            check_model(model, keys)


async def test_a_worker_that_asks_for_newer_routers_is_left_alone_and_a_newer_one_that_does_not_is_used() -> None:
    ahead = FakeWorker("ahead", protocol_version=PROTOCOL_VERSION + 5)
    beyond = FakeWorker("beyond", protocol_version=PROTOCOL_VERSION + 5, min_router_protocol=PROTOCOL_VERSION + 1)
    async with before(ahead, beyond, serve=(True, False)) as router:
        for _ in range(4):
            assert (await router.answer(PROMPT))[0].prompt.worker_id == "ahead"
        await until(lambda: "upgrade routers" in router.links[1].problem)
