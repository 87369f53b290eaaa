"""The sampler, before real connections to fake workers."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress

from tests.router.cluster import Cluster, cluster, until
from tests.router.fake_worker import FakeWorker
from tests.router.watch.watch_rig import stats
from trunkline.v1.fleet_pb2 import HistoryPoint, PredictedTtft
from trunkline_router.observe.watch.fleet_sampler import KEEPS_S, MOST_POINTS, FleetSampler, History, Periods

OFTEN = Periods(watched_s=0.01, idle_s=0.01, answers_s=0.01)


@asynccontextmanager
async def sampling(
    router: Cluster, periods: Periods = OFTEN, wanted: asyncio.Event | None = None
) -> AsyncIterator[FleetSampler]:
    sampler = FleetSampler(router.inference.pools, wanted or asyncio.Event(), periods=periods)
    running = asyncio.create_task(sampler.run())
    yield sampler
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running


def number(sampler: FleetSampler) -> int:
    return 0 if sampler.latest is None else sampler.latest.number


async def test_history_is_kept_while_nobody_watches() -> None:
    async with cluster(FakeWorker("a")) as router, sampling(router) as sampler:
        await until(lambda: len(sampler.history) >= 3)


async def test_the_first_watcher_does_not_wait_for_an_idle_period() -> None:
    seldom = Periods(watched_s=0.01, idle_s=3600.0, answers_s=0.01)
    wanted = asyncio.Event()
    async with cluster(FakeWorker("a")) as router, sampling(router, seldom, wanted) as sampler:
        wanted.set()
        first = await sampler.after(0)
        assert (await sampler.after(first.number)).number == first.number + 1


async def test_a_worker_that_does_not_answer_is_asked_once_and_holds_up_no_sample() -> None:
    mute, other = FakeWorker("a", hangs=True), FakeWorker("b", stats=stats(5.0))
    async with cluster(mute, other) as router, sampling(router) as sampler:
        await until(lambda: number(sampler) >= 5)
        assert mute.asked_for_stats == 1
        assert other.asked_for_stats > 1
        assert sampler.latest is not None
        told = {tile.worker_id: tile.HasField("sampled_unix_ms") for tile in sampler.latest.workers}
        assert told == {"a": False, "b": True}


async def test_a_worker_that_is_lost_leaves_nothing_behind() -> None:
    worker = FakeWorker("a", stats=stats(5.0))
    async with cluster(worker) as router, sampling(router) as sampler:
        await until(lambda: bool(sampler._rates))
        await worker.die()
        await until(lambda: router.links[0].worker is None)
        before = number(sampler)
        await until(lambda: number(sampler) > before + 1)
        assert (sampler._rates, sampler._asked) == ({}, {})


async def test_a_sample_that_fails_does_not_end_the_sampler() -> None:
    """A router takes the end of a background task for the end of its life."""
    failures = [KeyError("a bug"), KeyError("a bug")]

    def predicted() -> Mapping[str, PredictedTtft]:
        if failures:
            raise failures.pop()
        return {}

    async with cluster(FakeWorker("a")) as router:
        sampler = FleetSampler(router.inference.pools, asyncio.Event(), predicted, OFTEN)
        running = asyncio.create_task(sampler.run())
        await until(lambda: running.done() or number(sampler) > 0)
        assert (running.done(), failures) == (False, [])
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


def test_the_history_is_bounded_in_points_and_in_time() -> None:
    history = History()
    for n in range(1, 2 * MOST_POINTS):
        history.add(n, float(n), HistoryPoint(at_unix_ms=n))
    assert len(history) == MOST_POINTS
    assert [point.at_unix_ms for point in history.since(2 * MOST_POINTS - 4)] == [1197, 1198, 1199]
    history.add(5000, 1e6, HistoryPoint(at_unix_ms=5000))
    assert [point.at_unix_ms for point in history.since(0)] == [5000], f"older than {KEEPS_S} s"
