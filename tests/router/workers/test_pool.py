"""The workers that requests are routed among are kept until something changes, and are always those that there are."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from tests.router.cluster import Cluster, cluster, until
from tests.router.fake_worker import FakeWorker
from tests.router.integrity import check_pools
from tests.router.membership import Names, connected, membership
from trunkline.status import NO_WORKER, RequestRefused
from trunkline.v1.worker_pb2 import GetModelResponse
from trunkline_router.prompts.helper_pool import Helpers
from trunkline_router.routing.prefix_index import WorkerBlocks
from trunkline_router.routing.route_request import RouteRequest
from trunkline_router.workers.breaker import FAILURES_TO_OPEN, OPEN_FIRST_S, WorkerBreaker
from trunkline_router.workers.connected_worker import ConnectedWorker
from trunkline_router.workers.discovery import Addresses
from trunkline_router.workers.health import LEAST_SHARE
from trunkline_router.workers.link_context import LinkContext, LinkLimits
from trunkline_router.workers.pool import Pools
from trunkline_router.workers.session import WorkerSession
from trunkline_router.workers.worker_link import WorkerLink

PROMPT = range(10, 30)


@asynccontextmanager
async def watched(pools: Pools) -> AsyncIterator[None]:
    """Looks at each turn of the event loop whether what requests would be routed among is what there is."""

    async def watch() -> None:
        while True:
            check_pools(pools)
            pools.models()
            await asyncio.sleep(0)

    watching = asyncio.create_task(watch())
    yield
    assert not watching.done(), watching.exception()
    watching.cancel()


def routed(pools: Pools) -> set[str]:
    return {worker.worker_id for pool in pools.models().values() for worker in pool.workers}


def fleet_of(*fingerprints: str, capacities: tuple[int, ...] = ()) -> tuple[Pools, list[ConnectedWorker]]:
    """Pools of one model whose workers are connected, and stay so."""
    pools, workers = Pools(Random(0)), []
    for number, fingerprint in enumerate(fingerprints):
        tokenizer: Any = SimpleNamespace(encoding=b"", rendering=b"")
        tokenizers: Any = None
        model = GetModelResponse(
            model="m",
            worker_id=f"w{number}",
            fingerprint=fingerprint,
            block_size=16,
            context_length=4096,
            kv_token_capacity=capacities[number] if capacities else 4096,
        )
        link = WorkerLink(f"w{number}:1", LinkContext("r", tokenizers, pools.index, pools.notify, Random(0)))
        link.worker = ConnectedWorker(
            model, WorkerBlocks(pools.index), tokenizer, WorkerSession(), link.breaker, link.address
        )
        pools.links.append(link)
        workers.append(link.worker)
    return pools, workers


async def test_a_worker_that_is_lost_and_comes_back_is_out_and_in_at_once() -> None:
    a, b = FakeWorker("a"), FakeWorker("b")
    async with cluster(a, b) as router, watched(pools_of(router)):
        pools = pools_of(router)
        for _ in range(2):
            await a.die()
            await until(lambda: routed(pools) == {"b"})
            await a.start()
            await until(lambda: routed(pools) == {"a", "b"})


async def test_so_is_one_that_drains_and_accepts_again() -> None:
    a, b = FakeWorker("a"), FakeWorker("b")
    async with cluster(a, b) as router, watched(pools_of(router)):
        pools = pools_of(router)
        a.send_load(draining=True)
        await until(lambda: routed(pools) == {"b"})
        a.send_load(draining=False)
        await until(lambda: routed(pools) == {"a", "b"})


async def test_so_is_one_that_hangs_and_is_heard_of_again() -> None:
    a = FakeWorker("a", answer=None)
    async with cluster(a, link_limits=LinkLimits(inter_token_timeout_s=0.3)) as router, watched(pools_of(router)):
        pools = pools_of(router)
        stream = router.generate(PROMPT)
        choice = await a.arrived.get()
        choice.tokens(1)
        await stream.read()
        await until(lambda: not routed(pools))
        a.send_load(running=1)
        await until(lambda: routed(pools) == {"a"})
        (await a.arrived.get()).tokens(1, finish=True)  # it goes on where it was
        while await stream.read():
            pass


async def test_so_is_one_that_a_name_or_a_lease_brings_and_that_goes(helpers: Helpers) -> None:
    a, b = await FakeWorker("a").start(), await FakeWorker("b").start()
    names, leases = Names(), asyncio.Queue[Addresses]()

    async def leased() -> AsyncIterator[Addresses]:
        while True:
            yield await leases.get()

    async with membership(helpers, names.watch(), leases=leased()) as pools, watched(pools):
        await names.say(frozenset({a.address}))
        await until(lambda: routed(pools) == {"a"})
        leases.put_nowait(frozenset({b.address}))
        await until(lambda: routed(pools) == {"a", "b"})
        await names.say(frozenset())
        leases.put_nowait(frozenset())
        await until(lambda: not any(link.wanted for link in pools.links))
        assert routed(pools) == {"a", "b"}, "as long as they are connected"
        await a.die()
        await until(lambda: routed(pools) == {"b"})
        await b.die()
        await until(lambda: not pools.links)
        assert not routed(pools)
        assert not connected(pools)


async def test_failures_open_a_workers_breaker_time_lets_a_trial_through_and_its_success_closes_it() -> None:
    pools, (failing, _) = fleet_of("x", "x")
    pool = pools.pool("m")
    assert pool.allowed(pool.workers, 0.0) is pool.workers

    def allowed(now_s: float) -> list[str]:
        check_pools(pools)
        pool = pools.pool("m")
        return [worker.worker_id for worker in pool.allowed(pool.workers, now_s)]

    for _ in range(FAILURES_TO_OPEN):
        assert allowed(0.0) == ["w0", "w1"]
        failing.breaker.dispatch().refused(NO_WORKER, 0.0)
    assert allowed(0.0) == ["w1"]
    kept = pools.pool("m")
    assert allowed(OPEN_FIRST_S - 0.01) == ["w1"]
    assert allowed(OPEN_FIRST_S) == ["w0", "w1"], "by time alone"
    trial = failing.breaker.dispatch()
    assert allowed(OPEN_FIRST_S) == ["w1"], "one trial at a time"
    assert pools.pool("m") is kept
    trial.succeeded(OPEN_FIRST_S)
    assert allowed(OPEN_FIRST_S) == ["w0", "w1"]
    again = pools.pool("m")
    assert again.allowed(again.workers, OPEN_FIRST_S) is again.workers


def test_where_all_have_failed_all_are_allowed() -> None:
    pools, workers = fleet_of("x", "x")
    for worker in workers:
        worker.breaker.on_lost(0.0, 0.0)
    pool = pools.pool("m")
    assert pool.allowed(pool.workers, 0.0) == workers
    with pytest.raises(RequestRefused, match="no worker is left for model m"):
        pool.allowed([], 0.0)


def test_a_slow_start_counts_from_the_moment_it_changes_although_the_workers_stay_the_same() -> None:
    pools, (fresh, _) = fleet_of("x", "x")

    def chosen() -> set[str]:
        workers = pools.pool("m").workers
        return {pools.route(workers, RouteRequest(list(PROMPT))).worker.worker_id for _ in range(50)}

    kept = pools.pool("m")
    assert chosen() == {"w0", "w1"}
    fresh.take_share(LEAST_SHARE)
    one = pools.route(kept.workers, RouteRequest(list(PROMPT))).plan
    assert {candidate.worker_id: candidate.slow_start_s > 0 for candidate in one.candidates} == {
        "w0": True,
        "w1": False,
    }
    fresh.take_share(1.0)
    assert chosen() == {"w0", "w1"}
    assert pools.pool("m") is kept


def test_limits_are_those_of_the_most_capable_worker_and_long_requests_go_only_where_there_is_room() -> None:
    pools, (small, large) = fleet_of("x", "x", capacities=(1000, 3000))
    pool = pools.pool("m")
    assert pool.limits.worker_id == large.worker_id
    assert pool.with_room(1000) is pool.workers
    assert pool.with_room(1001) == [large]
    assert pool.with_room(3001) == []
    assert small in pool.workers


def test_what_is_kept_is_made_once_between_two_changes() -> None:
    pools, (worker, other) = fleet_of("x", "x")
    kept = pools.pool("m")
    assert pools.pool("m") is kept
    assert pools.pool("") is kept
    worker.is_hung = True
    with pytest.raises(AssertionError):
        check_pools(pools)
    pools.notify()
    assert pools.pool("m").workers == [other]
    check_pools(pools)


def test_a_breaker_says_when_it_opens_and_closes() -> None:
    turns: list[bool] = []
    breaker = WorkerBreaker(lambda: turns.append(breaker.is_closed))
    breaker.on_lost(0.0, 0.0)
    assert turns == [False]
    breaker.dispatch().succeeded(OPEN_FIRST_S)
    assert turns == [False, True]


def pools_of(router: Cluster) -> Pools:
    return router.inference.pools
