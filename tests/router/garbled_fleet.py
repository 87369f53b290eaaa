"""Two routers with one Redis, into which a client writes what no router writes."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from redis.asyncio import Redis

from tests.router.shared_state_rig import PATIENCE_S, PREFIX, Clock, Router, keys_in, use
from trunkline.status import RequestRefused
from trunkline_bench.servers.redis_server import RedisServer
from trunkline_router.quotas.convictions import CONVICTION_MS
from trunkline_router.quotas.quota import Quotas
from trunkline_router.quotas.redis_store import KEYS_OF_ALL_LIVES, RedisStore
from trunkline_router.quotas.store import KEEP_MS, Lease, WorkerKey
from trunkline_router.routing.credit import Credit

QUOTAS = Quotas(requests_per_minute=1_000, tokens_per_minute=100_000, tokens_in_flight=50_000)


class Fleet:
    """Two routers, and a client that writes garbage."""

    def __init__(self, client: Redis, routers: tuple[Router, Router], clock: Clock) -> None:
        self.client = client
        self.routers = routers
        self.clock = clock
        self._convicted = 0
        self._keys = PREFIX

    async def turn(self) -> None:
        """A second and more passes, and every router reports and hears something; each has a request."""
        self.clock.pass_s(2.5)  # and every probe is due
        for router in self.routers:
            if router.is_reachable:
                await router.beat()
            else:
                await router.link.probe(router.sync.beat)
            with contextlib.suppress(RequestRefused):
                use(await router.admit(QUOTAS), 10, 10)

    async def key(self, name: str) -> str:
        """Of the present life, or of the one before where that has no name."""
        if await self.client.type(PREFIX + "life") == "string":
            self._keys = await keys_in(self.client)
        return PREFIX + name if name in KEYS_OF_ALL_LIVES else self._keys + name

    async def put(self, name: str, kind: str, field: str | bytes, value: str | bytes) -> None:
        """A field of the key as it is, or a key of another type."""
        key = await self.key(name)
        client: Any = self.client
        if isinstance(field, str):
            window = int(self.clock.ms // 500)
            names = {"a": self.routers[0].link.name, "b": self.routers[1].link.name, "bucket": f"r{window}"}
            field = field.format(**names)
        if isinstance(value, str) and value.startswith("{now}"):
            value = f"{int(self.clock.ms) + 1000}{value[5:]}"
        if await client.type(key) != kind:
            await client.delete(key)
        if kind == "string":
            await client.set(key, value)
        elif kind == "hash":
            await client.hset(key, field, value)
        elif kind == "zset":
            await client.zadd(key, {value: _score(field)})
        elif kind == "stream":
            await client.xadd(key, {field or "f": value})
        else:
            await (client.rpush if kind == "list" else client.sadd)(key, value)

    async def check_whole(self) -> None:
        """What is said is heard, of everything that is shared; all keys expire."""
        a, b = self.routers
        self._convicted += 1
        worker, poison = WorkerKey("new", self._convicted), self._convicted.to_bytes(16, "big")
        a.fleet.own = {worker: Credit(1, 100)}
        lease = Lease(f"10.0.0.1:{50_000 + self._convicted}", "new", self._convicted, "tiny")
        a.fleet.own_leases = [lease]
        a.convict(poison)
        for _ in range(3):
            await self.turn()
        assert a.is_reachable
        assert b.is_reachable
        assert b.fleet.others.get(worker) == Credit(1, 100)
        assert lease in b.fleet.known
        assert b.is_convicted(poison)
        quotas = Quotas(requests_per_minute=3)
        admitted = []
        for router in (a, b, a, b):
            try:
                use(await router.admit(quotas, tenant=f"fresh-{self._convicted}"), 10, 10)
                admitted.append(True)
            except RequestRefused:
                admitted.append(False)
        assert admitted == [True, True, True, False]
        for key in await self.client.keys(await keys_in(self.client) + "*"):
            assert 0 < await self.client.pttl(key) <= max(100 * KEEP_MS, 2 * CONVICTION_MS), key

    def check_bounded(self) -> None:
        """In what routers keep of it."""
        for router in self.routers:
            assert len(router.convictions._ends) <= 4096
            assert all(end <= self.clock.ms + CONVICTION_MS for end in router.convictions._ends.values())
            assert len(router._own.neighbours) < 50
            assert len(router.fleet.known) < 50
            assert len(router._own.book._tenants) < 50


def _score(text: str | bytes) -> float:
    try:
        score = float(text)
    except ValueError:
        return 1e300
    return score if score == score else 1e300


@contextlib.asynccontextmanager
async def fleet(redis: RedisServer) -> AsyncIterator[Fleet]:
    clock = Clock()
    async with Redis.from_url(redis.url, decode_responses=True, encoding_errors="replace") as client:
        await client.flushall()
        stores = [RedisStore(redis.url, "trunkline:", patience_s=PATIENCE_S, clock_ms=clock.now_ms) for _ in "ab"]
        routers = Router(stores[0], "a", clock), Router(stores[1], "b", clock)
        for router in routers:
            await router.start()
        both = Fleet(client, routers, clock)
        try:
            for _ in range(2):
                await both.turn()
            yield both
        finally:
            for router in routers:
                await router.link.store.close()
