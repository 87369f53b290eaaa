"""Fleets whose routers together say more than one answer of Redis holds: each of them is heard, the busiest too."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from random import Random

import pytest
from redis.asyncio import Redis
from structlog.testing import capture_logs

from tests.router.shared_state_rig import PATIENCE_S
from trunkline_bench.servers.redis_server import RedisServer
from trunkline_router.quotas.fleet import MOST_CREDITS, MOST_TENANTS, Neighbours
from trunkline_router.quotas.redis_entries import MOST_CREDIT_BYTES, written_credits
from trunkline_router.quotas.redis_store import RedisStore
from trunkline_router.quotas.store import NeighbourReport, Report, SyncReply, WorkerKey
from trunkline_router.routing.credit import Credit

HALF_AN_ANSWER = 262_144  # bytes; see TOLD_BYTES in sync.lua
Credits = dict[WorkerKey, Credit]


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


class Speakers:
    """Other routers, by name, that report what the test wants, and one that listens."""

    def __init__(self, speaking: RedisStore, listening: RedisStore) -> None:
        self._speaking = speaking
        self._listening = listening
        self._number = 0
        self._life = ""
        self._said: dict[str, int] = {}  # versions
        self.neighbours = Neighbours()

    async def say(self, name: str, credits: Credits) -> int:
        """Returns the version under which the others know them."""
        while True:
            self._number += 1
            report = Report(name, self._life, self._number, credits=credits, known=self._said)
            reply = await self._speaking.sync(report)
            if reply.life == self._life:
                self._said[name] = self._number
                return self._number
            self._life = reply.life

    async def listen(self) -> SyncReply:
        self._number += 1
        report = Report("listener", self._life, self._number, known=self.neighbours.versions)
        reply = await self._listening.sync(report)
        assert reply.life == self._life
        self.neighbours.hear(reply)
        return reply


@asynccontextmanager
async def speakers(redis: RedisServer, prefix: str) -> AsyncIterator[Speakers]:
    # Its time stands still: no router is taken for dead, however slow the machine is.
    stores = [RedisStore(redis.url, prefix, patience_s=PATIENCE_S, clock_ms=lambda: 1e12) for _ in range(2)]
    try:
        for store in stores:
            await store.connect()
        yield Speakers(*stores)
    finally:
        for store in stores:
            await store.close()


def sent_to(workers: int, rng: Random) -> Credits:
    return {
        WorkerKey(f"trunkline-worker-llama-70b-{number:05d}-x7k2p", 2**63 + number): Credit(
            rng.randrange(1, 60), rng.randrange(10_000, 100_000)
        )
        for number in range(workers)
    }


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
async def test_every_router_is_heard_after_a_bounded_number_of_syncs_however_much_all_of_them_say(
    redis: RedisServer, seed: int
) -> None:
    rng = Random(seed)
    sizes = {f"router-{number:02d}": rng.choice((5, 1400, 1600)) for number in range(12)}
    credits = {name: sent_to(workers, rng) for name, workers in sizes.items()}
    said_bytes = sum(len(written_credits(said, ())) for said in credits.values())
    assert said_bytes > 2 * HALF_AN_ANSWER
    syncs = said_bytes // (HALF_AN_ANSWER - MOST_CREDIT_BYTES) + 2
    async with speakers(redis, f"turns-{seed}") as fleet:
        heard: list[set[str]] = []
        with capture_logs() as lines:
            for turn in range(2 * syncs):
                for name in sizes:
                    await fleet.say(name, credits[name] | {WorkerKey("w", 1): Credit(turn, turn)})
                reply = await fleet.listen()
                assert reply.changed, "each sync brings something"
                heard.append(set(reply.changed))
                small = {name for name, workers in sizes.items() if workers == 5}
                assert small <= reply.changed.keys(), "a router that reports little is heard each time"
        for begin in range(syncs + 1):
            assert set().union(*heard[begin : begin + syncs]) == sizes.keys()
        said = [line for line in lines if "in turns" in line["event"]]
        assert len(said) <= 2, "once for each of the two ends"
        assert said


async def test_what_a_router_knows_already_takes_no_room_from_what_is_new(redis: RedisServer) -> None:
    rng = Random(1)
    names = [f"router-{number:02d}" for number in range(63)]
    async with speakers(redis, "known") as fleet:
        versions = {name: await fleet.say(name, sent_to(400, rng)) for name in names}
        for _ in names:
            if fleet.neighbours.versions == versions:
                break
            await fleet.listen()
        assert fleet.neighbours.versions == versions
        assert len(fleet.neighbours._reports) * 400 == sum(
            len(said.credits) for said in fleet.neighbours._reports.values()
        )
        assert not (await fleet.listen()).changed
        for name in (names[0], names[31], names[62]):
            busiest = sent_to(1600, rng)
            version = await fleet.say(name, busiest)
            (heard,) = (await fleet.listen()).changed.items()
            assert heard == (name, NeighbourReport(version, busiest, []))


async def test_a_router_whose_entry_has_no_version_is_heard_too(redis: RedisServer) -> None:
    """As routers of the version before write it."""
    rng = Random(2)
    async with speakers(redis, "older") as fleet:
        for name in ("older", "newer"):
            await fleet.say(name, sent_to(3, rng))
        await fleet.listen()
        key = f"{fleet._listening._of(fleet._life)}routers"
        version = await fleet.say("older", sent_to(4, rng))
        await without_version(redis, key, "older")
        reply = await fleet.listen()
        assert set(reply.routers) == {"older", "newer"}
        assert {name: said.version for name, said in reply.changed.items()} == {"older": version}
        assert not (await fleet.listen()).changed, "what is known is not told again"


async def without_version(redis: RedisServer, key: str, name: str) -> None:
    client: Redis = Redis.from_url(redis.url, decode_responses=True)
    async with client:
        dead_from, _, counted = str(await client.hget(key, name)).split(":")
        await client.hset(key, name, f"{dead_from}:{counted}")


def test_of_a_fleet_of_64_routers_and_400_workers_nothing_is_left_out() -> None:
    rng, neighbours = Random(3), Neighbours()
    said = {f"router-{number}": NeighbourReport(1, sent_to(400, rng), ()) for number in range(63)}
    neighbours.hear(SyncReply("life", tuple(said), said))
    sums = neighbours.credits()
    assert sum(credit.tokens for credit in sums.values()) == sum(
        credit.tokens for other in said.values() for credit in other.credits.values()
    )


def test_beyond_what_is_kept_the_busiest_routers_keep_the_workers_they_sent_the_most_to() -> None:
    rng, neighbours = Random(4), Neighbours()
    said = {f"router-{number}": NeighbourReport(1, sent_to(200, rng), ()) for number in range(40)}
    said |= {f"busy-{number}": NeighbourReport(1, sent_to(MOST_CREDITS // 10, rng), ()) for number in range(20)}
    neighbours.hear(SyncReply("life", tuple(said), said))
    kept = neighbours._reports
    assert sum(len(other.credits) for other in kept.values()) <= MOST_CREDITS
    for name, other in said.items():
        if name.startswith("router"):
            assert kept[name].credits == other.credits
        else:
            least = min(credit.tokens for credit in kept[name].credits.values())
            assert len(kept[name].credits) == MOST_CREDITS // len(said)
            assert all(credit.tokens <= least for key, credit in other.credits.items() if key not in kept[name].credits)
    total: dict[WorkerKey, int] = {}
    for other in kept.values():
        for key, credit in other.credits.items():
            total[key] = total.get(key, 0) + credit.tokens
    assert {key: credit.tokens for key, credit in neighbours.credits().items()} == total


def test_routers_that_come_one_by_one_keep_no_more_together() -> None:
    rng, neighbours = Random(5), Neighbours()
    names: list[str] = []
    for number in range(60):
        names.append(f"router-{number}")
        said = NeighbourReport(1, sent_to(2000, rng), [f"tenant-{number}-{other}" for other in range(500)])
        neighbours.hear(SyncReply("life", tuple(names), {names[-1]: said}))
    kept = neighbours._reports
    assert [len(kept[name].credits) for name in names] == [MOST_CREDITS // len(names)] * len(names)
    assert len(neighbours.competing) <= MOST_TENANTS
    told = sum(credit.tokens for other in kept.values() for credit in other.credits.values())
    assert sum(credit.tokens for credit in neighbours.credits().values()) == told
