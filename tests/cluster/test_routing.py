"""Routing follows what workers hold, not rendezvous hashing."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.cluster.processes import Cluster, Worker, running_cluster, wait_until
from tests.worker.engine_rig import DEMO_MODEL
from trunkline import Client
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.worker_pb2 import Submit, WorkerServiceGenerateRequest

KV_BLOCKS = 64


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # That one worker was found seconds before the other must not matter here.
    environment = {"TRUNKLINE_SLOW_START_S": "0"}
    with running_cluster(DEMO_MODEL, f"--kv-blocks={KV_BLOCKS}", environment=environment) as running:
        yield running


def prime(worker: Worker, prompt: list[int]) -> None:
    submit = Submit(prompt_token_ids=prompt, sampling=SamplingParams(seed=1, temperature=0, max_tokens=1))
    list(worker.stub.Generate(WorkerServiceGenerateRequest(submit=submit)))


def fill(worker: Worker, token: int) -> None:
    """Evicts everything else: a prompt that needs nearly the whole pool."""
    prime(worker, [token] * (KV_BLOCKS - 1) * 16)


async def route(client: Client, prompt: list[int]) -> tuple[str, int]:
    done = await client.complete(prompt, max_tokens=1, temperature=0.0)
    return done.prompt.worker_id, done.usage.cached_tokens


async def test_requests_follow_a_prefix_from_worker_to_worker(cluster: Cluster) -> None:
    a, b = cluster.workers
    async with Client(cluster.address) as client:
        for number, holder in enumerate((b, a, b, a)):
            prompt = [100 + number] * 8 + list(range(200, 296))  # a new one each time: 6 full blocks
            prime(holder, prompt)
            wait_until(lambda prompt=prompt, holder=holder: cluster.matched(prompt)[holder.address] == 96, "primed")  # type: ignore[misc]
            assert await route(client, prompt) == (holder.address, 96), f"prefix {number}"
        # Evicted at one and computed at the other: it follows.
        prompt = [50] * 8 + list(range(200, 296))
        prime(b, prompt)
        wait_until(lambda: cluster.matched(prompt) == {a.address: 0, b.address: 96}, "primed")
        assert await route(client, prompt) == (b.address, 96)
        fill(b, 77)
        prime(a, prompt)
        wait_until(lambda: cluster.matched(prompt)[a.address] == 96, "primed")
        wait_until(lambda: cluster.matched(prompt)[b.address] < 96, "evicted")
        assert await route(client, prompt) == (a.address, 96)


async def test_unrelated_requests_spread(cluster: Cluster) -> None:
    """All at once: after a step that a busy machine has held up, a worker seems slower until the others are loaded."""
    async with Client(cluster.address) as client:
        found = await asyncio.gather(*(route(client, [n] * 40) for n in range(60, 100)))
    homes = [home for home, _ in found]
    assert min(homes.count(worker.address) for worker in cluster.workers) >= 4
