"""Watching a router's fleet, over real gRPC."""

import asyncio
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.router.cluster import PATIENCE_S, Cluster, cluster, refusal, until
from tests.router.fake_worker import FakeWorker
from tests.router.watch.watch_rig import (
    ACME,
    BLIND,
    OPERATOR,
    OTHER,
    SCRAPER,
    KeyRing,
    stats,
    tile,
    until_view,
    watch,
    watched_router,
)
from trunkline.status import OVERLOADED
from trunkline.v1 import fleet_pb2
from trunkline.v1.fleet_pb2 import HistoryPoint, ListRequestsRequest, WatchFleetRequest, WorkerTile
from trunkline.v1.fleet_pb2_grpc import FleetServiceStub
from trunkline_router.access.access import Access, Tenant, Tenants
from trunkline_router.observe.watch.fleet_sampler import MOST_POINTS, FleetSample
from trunkline_router.observe.watch.fleet_watch import MOST_OF_CALLER
from trunkline_router.quotas.quota import Quotas


def latest(router: Cluster) -> FleetSample:
    """The last sample."""
    sample = router.watch.sampler.latest
    assert sample is not None
    return sample


TENANTS = Tenants({"acme": Tenant(quotas=Quotas(requests_per_minute=100))})


async def test_a_watcher_gets_the_state_at_once_and_then_what_changes() -> None:
    worker = FakeWorker("a", stats=stats(10.0))
    async with cluster(worker) as router:
        worker.send_load(running=3, waiting=1, kv_live_blocks=10, kv_cached_blocks=20, kv_free_blocks=70)
        await until(lambda: router.connected(0).load.running == 3)
        call = watch(router, {})
        first = await call.read()
        shown = tile(first, "a")
        assert (shown.state, shown.reason, shown.model) == (fleet_pb2.WORKER_STATE_READY, "", "tiny")
        assert (shown.running, shown.waiting, shown.address) == (3, 1, worker.address)
        assert (shown.kv.live_blocks, shown.kv.cached_blocks, shown.kv.free_blocks) == (10, 20, 70)
        assert first.router.watchers == 1
        await until_view(call, lambda view: tile(view, "a").HasField("sampled_unix_ms"))
        worker.stats = stats(12.0, steps=20, decode=400, prefill=600, hits=1400)
        view = await until_view(call, lambda view: tile(view, "a").HasField("batch"))
        shown = tile(view, "a")
        assert shown.batch.decode_tokens_per_s == shown.output_tokens_per_s == 200.0
        assert (shown.batch.prefill_tokens_per_s, shown.batch.steps_per_s, shown.batch.busy_share) == (300.0, 10.0, 0.5)
        assert (shown.hit_rate, shown.ttft_p50_s, shown.lanes[0].ttft_p99_s) == (0.7, 0.25, 1.0)
        assert view.history.points[-1].decode_tokens_per_s == 200.0
        worker.send_load(running=7)
        await until_view(call, lambda view: tile(view, "a").running == 7)
        call.cancel()
        await until(lambda: not router.watch.watchers.num_open)


async def test_tiles_follow_a_worker_that_dies_and_returns() -> None:
    worker, other = FakeWorker("a", stats=stats(5.0)), FakeWorker("b")
    async with cluster(worker, other, expected=(True, True)) as router:
        call = watch(router, {})
        assert {shown.state for shown in (await call.read()).workers} == {fleet_pb2.WORKER_STATE_READY}
        await worker.die()
        gone = await until_view(call, lambda view: tile(view, "a").state == fleet_pb2.WORKER_STATE_CONNECTING)
        assert tile(gone, "a").reason
        assert not tile(gone, "a").HasField("running")
        assert gone.history.points[-1].workers == 1
        await worker.start()
        back = await until_view(call, lambda view: tile(view, "a").HasField("running"))
        assert tile(back, "a").state == fleet_pb2.WORKER_STATE_BROKEN, "until a trial request succeeds"
        assert tile(back, "a").reason == "requests failed there recently"
        call.cancel()


async def test_a_second_watcher_has_the_history_of_the_first_and_costs_the_workers_nothing() -> None:
    worker = FakeWorker("a", stats=stats(5.0))
    async with cluster(worker) as router:
        call = watch(router, {})
        numbers: list[int] = []
        while len(numbers) < 4:
            view = await call.read()
            numbers += [point.at_unix_ms for point in view.history.points]
        assert numbers == sorted(set(numbers)), "each point once"
        more = [watch(router, {}) for _ in range(3)]
        for other in more:
            first = await other.read()
            assert [point.at_unix_ms for point in first.history.points][: len(numbers)] == numbers
        samples, asked = latest(router).number, worker.asked_for_stats
        assert asked <= samples, "one sampler asks, whatever the number of watchers"
        for one in (call, *more):
            one.cancel()
        await until(lambda: not router.watch.watchers.num_open)


async def test_a_watcher_that_does_not_read_gets_the_latest_state_and_nothing_is_kept_for_it() -> None:
    worker = FakeWorker("a")
    async with cluster(worker) as router:
        views = router.watch.views(lambda: Access().caller(()))
        first = await anext(views)
        for running in range(1, 6):
            worker.send_load(running=running)
            await until(lambda running=running: latest(router).workers[0].running == running)  # type: ignore[misc]
        second = await anext(views)
        assert second.shown.workers[0].running == 5, "the states between are missed"
        assert len(second.points) >= 5, "but not the points of the history"
        assert not first.shown.workers[0].running
        await views.aclose()


async def test_a_watcher_that_reads_nothing_loses_its_place_and_one_that_reads_stays() -> None:
    small = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 0))  # or its gRPC reads megabytes ahead
    async with cluster(FakeWorker("a"), unread_s=1.0) as router:
        reading = watch(router, {})
        await reading.read()
        point = HistoryPoint(running=2, waiting=1, prefill_tokens_per_s=3.5, decode_tokens_per_s=4.5, kv_free_blocks=9)
        for number in range(1, MOST_POINTS):  # more than the client's window holds
            router.watch.sampler.history.add(number, time.monotonic(), point)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{router.port}", small) as channel:
            fleet: Any = FleetServiceStub(channel)
            call = fleet.WatchFleet(WatchFleetRequest())
            await until(lambda: router.watch.watchers.num_open == 2)

            async def read_on() -> None:
                while router.watch.watchers.num_open == 2:
                    await reading.read()

            await asyncio.wait_for(read_on(), PATIENCE_S)
            ended = await refusal(call)
            assert (ended.code, ended.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, OVERLOADED)
        assert await reading.read()
        reading.cancel()
        await until(lambda: not router.watch.watchers.num_open)


async def test_watchers_with_equal_rights_share_one_message_of_each_sample() -> None:
    async with cluster(FakeWorker("a")) as router:
        watchers = [router.watch.views(lambda: Access().caller(())) for _ in range(MOST_OF_CALLER)]
        for _ in range(3):
            views = await asyncio.gather(*(anext(watcher) for watcher in watchers))
            messages, samples = {id(view.shown) for view in views}, {view.shown.at_unix_ms for view in views}
            assert len(messages) == len(samples)
        leaving = asyncio.create_task(anext(watchers[0]))
        others = [asyncio.create_task(anext(watcher)) for watcher in watchers[1:]]
        number = latest(router).number
        await until(lambda: latest(router).number > number)
        leaving.cancel()
        assert len({id(view.shown) for view in await asyncio.gather(*others)}) == 1
        await asyncio.gather(leaving, return_exceptions=True)
        for watcher in watchers:
            await watcher.aclose()


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> KeyRing:
    return KeyRing(tmp_path_factory.mktemp("keys"))


async def test_callers_see_what_their_roles_allow(keys: KeyRing) -> None:
    worker = FakeWorker("a", stats=stats(5.0))
    async with watched_router(keys, worker, tenants=TENANTS) as router:
        worker.send_load(running=3, kv_live_blocks=10, kv_cached_blocks=20, kv_free_blocks=70)
        await until(lambda: router.inner.connected(0).load.running == 3)
        for who in (ACME, OTHER):
            await router.generate({**keys.headers(who)}, text=f"of {who}")

        async def seen(who: str, tenant: str = "") -> Any:
            call = watch(router, keys.headers(who, tenant))
            view = await until_view(call, lambda view: view.history.points[-1:] is not None)
            call.cancel()
            return view

        of_operator, of_acme, of_other, of_blind = [await seen(who) for who in (OPERATOR, ACME, OTHER, BLIND)]
        assert {entry.tenant for entry in of_operator.requests} == {"acme", "other"}
        assert {entry.tenant for entry in of_operator.tenants} == {"acme", "other"}, "configured, or seen lately"
        assert of_operator.you.can_drain
        assert of_operator.history.points
        for view, tenant in ((of_acme, "acme"), (of_other, "other")):
            assert {entry.tenant for entry in view.requests} == {tenant}
            assert [entry.tenant for entry in view.tenants] == [tenant]
            assert not view.history.points
            public = WorkerTile(worker_id="a", model="tiny", state=fleet_pb2.WORKER_STATE_READY)
            assert list(view.workers) == [public], "nothing that depends on others' requests"
            assert not view.you.can_drain
        (quota,) = of_acme.tenants[0].quotas
        assert (quota.quota, quota.limit, quota.used) == ("requests_per_minute", 100, 1.0)
        assert not of_other.tenants[0].quotas
        assert not of_blind.HasField("prefixes")
        assert (of_blind.workers[0].kv.cached_blocks, of_blind.workers[0].kv.free_blocks) == (0, 90)
        assert not of_blind.workers[0].HasField("hit_rate")
        assert {entry.worker_id for entry in of_blind.requests} == {""}
        assert not any(entry.HasField("cached_tokens") for entry in of_blind.requests)


async def test_strangers_see_nothing_of_each_other(keys: KeyRing) -> None:
    async with watched_router(keys, FakeWorker("a"), allows_anonymous=True) as router:
        await router.generate({}, text="of a stranger")
        call = watch(router, {})
        view = await call.read()
        call.cancel()
        assert (list(view.requests), list(view.tenants), view.HasField("prefixes")) == ([], [], False)
        assert not view.you.sees_requests
        assert [shown.worker_id for shown in view.workers] == [""]
        listed = await router.fleet.ListRequests(ListRequestsRequest(), timeout=PATIENCE_S)
        assert not listed.requests
        assert (await refusal(watch(router, keys.headers(SCRAPER)))).code is grpc.StatusCode.PERMISSION_DENIED


async def test_a_key_that_is_revoked_ends_its_watch(tmp_path: Path) -> None:
    keys = KeyRing(tmp_path)
    async with watched_router(keys, FakeWorker("a")) as router:
        call = watch(router, keys.headers(ACME))
        await call.read()
        for record in keys.file.records:
            record["revoked"] = record["created"]
        await router.read_keys(keys.file)
        assert (await refusal(call)).reason == "UNAUTHENTICATED"


async def test_a_caller_that_acts_for_many_tenants_takes_no_more_places(keys: KeyRing) -> None:
    async with watched_router(keys, FakeWorker("a")) as router:
        calls = [watch(router, keys.headers(OPERATOR, f"t{number}")) for number in range(MOST_OF_CALLER)]
        for call in calls:
            await call.read()
        assert (await refusal(watch(router, keys.headers(OPERATOR, "one-more")))).reason == "OVERLOADED"
        for call in calls:
            call.cancel()


async def test_a_caller_has_a_bounded_number_of_watches(keys: KeyRing) -> None:
    async with watched_router(keys, FakeWorker("a")) as router:
        calls = [watch(router, keys.headers(ACME)) for _ in range(MOST_OF_CALLER)]
        for call in calls:
            await call.read()
        refused = await refusal(watch(router, keys.headers(ACME)))
        assert (refused.reason, refused.retry_s) == ("OVERLOADED", 5.0)
        other = watch(router, keys.headers(OTHER))
        await other.read()
        calls[0].cancel()
        await until(lambda: router.inner.watch.watchers.num_open == MOST_OF_CALLER)
        again = watch(router, keys.headers(ACME))
        await again.read()
        for call in (*calls, other, again):
            call.cancel()
