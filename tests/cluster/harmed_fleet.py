"""One fleet of real processes for all accidents that it survives, and what its streams are without any."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from tests.worker.engine_rig import DEMO_MODEL
from trunkline.client.client import Client
from trunkline_bench.faults.fleet import START_S, Fleet, routers_before, running_fleet
from trunkline_bench.faults.main import poison_environment, quotas_of_all, worker_flags
from trunkline_bench.faults.scenarios import recover, undisturbed
from trunkline_bench.faults.streams import Order, Record, orders
from trunkline_bench.servers.ports import free_port
from trunkline_bench.servers.redis_server import RedisServer

STREAMS, MANY, FEWEST = 20, 16, 8
# An accident that strikes a tenth of the way must find streams that run, however late their client reads.
TOKENS, LONG = (80, 160), (100, 200)
INTER_TOKEN_TIMEOUT = "--inter-token-timeout-s=3"  # a worker that waits for a core must not be taken for hung
DRAIN_S = 0.2  # of workers that are told to stop: shorter than streams are
SILENCE_S = 1.0  # of a worker, to a direct client
KEY = "a key for tests, of thirty-two bytes"


@dataclass(frozen=True, slots=True)
class HarmedFleet:
    """Clients reach its router as `routed` and over HTTP, and with grants as `direct`. Its engines die of POISON."""

    routed: Fleet
    direct: Fleet
    http_port: int
    wanted: Sequence[Order]
    expected: Sequence[Record]  # of the same length

    def longest(self, count: int) -> tuple[list[Order], list[Record]]:
        """The streams with the most tokens: some are still running after a while."""
        pairs = zip(self.wanted, self.expected, strict=True)
        chosen = sorted(pairs, key=lambda pair: -int(pair[0].options["max_tokens"]))[:count]
        return [order for order, _ in chosen], [record for _, record in chosen]

    async def make_whole(self) -> None:
        """Whatever the last test has left."""
        await self.routed.restart_routers()
        for client in self.direct.clients:
            await client.ready(START_S)
        await asyncio.gather(*(recover(self.routed, worker) for worker in self.routed.workers))
        await self.routed.nothing_live()


@dataclass(frozen=True, slots=True)
class SharingPair:
    """Two more routers before the same workers, that ask a Redis of theirs for every request's quotas."""

    routed: Fleet
    redis: RedisServer

    def printed(self, text: str) -> list[int]:
        """How many lines of each router have it."""
        return [sum(text in line for line in router.lines) for router in self.routed.routers]

    async def make_whole(self) -> None:
        await self.routed.restart_routers()
        await self.routed.all_ready()


@asynccontextmanager
async def sharing_pair(fleet: Fleet) -> AsyncIterator[SharingPair]:
    with RedisServer() as redis, quotas_of_all() as tenants:
        flags = (INTER_TOKEN_TIMEOUT, f"--grant-key={KEY}", f"--redis-url={redis.url}", f"--tenants={tenants}")
        async with routers_before(fleet.workers, 2, *flags, name="sharing") as routed:
            yield SharingPair(routed, redis)


@asynccontextmanager
async def harmed_fleet() -> AsyncIterator[HarmedFleet]:
    wanted, http_port = orders(MANY, tokens=TOKENS), free_port()
    async with running_fleet(
        DEMO_MODEL,
        *worker_flags(deterministic=True, drain_timeout_s=DRAIN_S),
        router_arguments=(
            INTER_TOKEN_TIMEOUT,
            f"--grant-key={KEY}",
            f"--http-port={http_port}",
            "--stop-timeout-s=600",
        ),
        environment=poison_environment() | {"TRUNKLINE_GRANT_KEY": KEY},
    ) as routed:
        expected = await undisturbed(routed, wanted)
        assert not [record.error or record.seams for record in expected if record.error or record.seams]
        async with Client(routed.addresses[0], direct=True, inter_token_timeout_s=SILENCE_S) as client:
            yield HarmedFleet(routed, replace(routed, clients=[client]), http_port, wanted, expected)
