"""Clocks that jump, routers with different settings, and what a router of the previous version has left in Redis."""

import json
from array import array
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis

from tests.router.shared_state_rig import PREFIX, Clock, Router, keys_in, use
from trunkline.status import RequestRefused
from trunkline_bench.servers.redis_server import RedisServer
from trunkline_router.quotas.convictions import CONVICTION_MS, Convictions
from trunkline_router.quotas.quota import Quotas
from trunkline_router.quotas.redis_store import RedisStore
from trunkline_router.quotas.redis_url import conviction_key
from trunkline_router.quotas.store import Lease, WorkerKey
from trunkline_router.request.failover import Computation, Quarantine, RetryBudget
from trunkline_router.routing.credit import Credit

HOUR_S, DAY_S = 3600.0, 86_400.0
QUOTAS = Quotas(requests_per_minute=10, tokens_in_flight=1_000)
JUMPS_S = (HOUR_S, -HOUR_S, DAY_S, -DAY_S, 365 * DAY_S)


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


class Fleet:
    """Two routers whose own clocks are steady, and a Redis whose clock may jump."""

    def __init__(self, client: Redis, routers: tuple[Router, Router], clock: Clock, store_clock: Clock) -> None:
        self.client = client
        self.routers = routers
        self._clock = clock
        self.store_clock = store_clock
        self._turns = 0

    async def turn(self) -> None:
        """A second passes, and every router reports and hears something."""
        self._clock.pass_s(1.0)
        self.store_clock.pass_s(1.0)
        for router in self.routers:
            await router.beat()
            assert router.is_reachable

    async def admitted(self, tenant: str, count: int) -> int:
        """Of so many requests, at both routers by turns."""
        number = 0
        for turn in range(count):
            try:
                use(await self.routers[turn % 2].admit(QUOTAS, tenant=tenant), 10, 10)
                number += 1
            except RequestRefused:
                pass
        return number


@asynccontextmanager
async def fleet(redis: RedisServer) -> AsyncIterator[Fleet]:
    clock, store_clock = Clock(), Clock()
    async with Redis.from_url(redis.url, decode_responses=True, socket_connect_timeout=60) as client:
        await client.flushall()
        routers = []
        for name in "ab":
            store = RedisStore(redis.url, "trunkline:", clock_ms=store_clock.now_ms)
            store._redis._reply_timeout_s = 20.0
            routers.append(Router(store, name, clock))
        for router in routers:
            await router.start()
        try:
            yield Fleet(client, (routers[0], routers[1]), clock, store_clock)
        finally:
            for router in routers:
                await router.link.store.close()


@pytest.mark.parametrize("jumps_s", [(jump_s,) for jump_s in JUMPS_S] + [(HOUR_S, -DAY_S, HOUR_S, DAY_S)])
async def test_a_clock_of_redis_that_jumps_loses_nothing_for_longer_than_two_beats(
    redis: RedisServer, jumps_s: tuple[float, ...]
) -> None:
    async with fleet(redis) as both:
        a, b = both.routers
        worker, lease = WorkerKey("w", 5), Lease("10.0.0.1:50061", "w", 5, "tiny")
        a.fleet.own, a.fleet.own_leases = {worker: Credit(2, 50)}, [lease]
        a.convict(b"\x01" * 16)
        await both.turn()
        await both.turn()
        assert await both.admitted("t", 6) == 6
        for jump_s in jumps_s:
            both.store_clock.pass_s(jump_s)
            for _ in range(3):
                await both.turn()
            assert b.fleet.others == {worker: Credit(2, 50)}
            assert lease in b.fleet.known
            assert b.is_convicted(b"\x01" * 16)
            assert await both.client.zcard(f"{PREFIX}convictions") == 1
            # A window may begin anew, and never holds more than the quota from then on.
            assert await both.admitted("t", 12) <= 10
            assert await both.admitted(f"fresh {jump_s}", 12) == 10
            a.convictions.add(b"\x01" * 16, a._now_ms())  # it is made again, or would end within the hours


@given(
    moments=st.lists(st.floats(-DAY_S, DAY_S), min_size=1, max_size=20),
)
def test_retry_budgets_and_convictions_stand_a_clock_that_goes_back_and_forth(moments: list[float]) -> None:
    budget, convictions = RetryBudget(0.0), Convictions()
    for now_s in moments:
        budget.on_request()
        delay_s = budget.take(now_s)
        assert delay_s is None or 0 <= delay_s < HOUR_S
        convictions.add(b"x", now_s * 1e3)
        assert convictions.holds(b"x", now_s * 1e3)
        assert not convictions.holds(b"x", now_s * 1e3 + CONVICTION_MS)
        assert all(
            0 <= ttl_ms <= CONVICTION_MS for ttl_ms in convictions.next_report(now_s * 1e3, is_beat=True).values()
        )


def test_routers_with_different_keys_do_not_know_each_other_s_convictions() -> None:
    keys = [conviction_key("redis://h", prefix, key) for prefix in ("p", "q") for key in (b"", b"k", b"l")]
    poison = Computation("t", "m", array("i", [1, 2, 3]))
    for one, other in permutations(keys, 2):
        shared = Convictions()
        Quarantine(one, shared).convict(poison, {"w"}, 0.0)
        Quarantine(other, shared).check(poison, 1.0)
        with pytest.raises(RequestRefused):
            Quarantine(one, shared).check(poison, 1.0)


async def test_routers_with_different_quotas_of_one_tenant_each_hold_it_to_their_own(redis: RedisServer) -> None:
    async with fleet(redis) as both:
        strict, lax = both.routers

        async def admits(router: Router, most: int) -> bool:
            try:
                use(await router.admit(Quotas(requests_per_minute=most)), 10, 10)
            except RequestRefused:
                return False
            return True

        assert [await admits(strict, 3) for _ in range(4)] == [True] * 3 + [False]
        assert [await admits(lax, 8) for _ in range(6)] == [True] * 5 + [False], "those of the strict one counted"
        assert not await admits(strict, 3)


async def test_what_a_router_of_the_previous_version_says_is_heard_and_it_hears_this_one(redis: RedisServer) -> None:
    """As its sync.lua writes: the format of entries is the same."""
    async with fleet(redis) as both:
        await both.turn()
        keys, now_ms = await keys_in(both.client), int(both.store_clock.ms)
        await both.client.hset(keys + "routers", "previous/1", f"{now_ms + 3000}:7")
        await both.client.hset(keys + "credits", "previous/1", '7|[[["w", "5", 4, 900]], ["t"]]')
        await both.client.hset(keys + "leases", "10.0.0.9:50061", f'{now_ms + 3000}|["w", "5", "tiny"]')
        await both.client.hincrby(keys + "versions", "leases", 1)
        await both.client.zadd(f"{PREFIX}convictions", {"ab" * 16: now_ms + 60_000})
        await both.client.hincrby(keys + "versions", "convictions", 1)
        a, b = both.routers
        b.fleet.own = {WorkerKey("v", 6): Credit(1, 100)}
        await both.turn()
        assert a.fleet.others[WorkerKey("w", 5)] == Credit(4, 900)
        assert Lease("10.0.0.9:50061", "w", 5, "tiny") in a.fleet.known
        assert a.is_convicted(b"\xab" * 16)
        version, _, said = str(await both.client.hget(keys + "credits", b.link.name)).partition("|")
        assert int(version) > 0
        assert json.loads(said) == [[["v", "6", 1, 100]], []]
