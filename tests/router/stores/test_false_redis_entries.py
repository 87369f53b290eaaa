"""Entries in the form that routers write, in numbers and sizes that no fleet has: a router takes in what it can use in
short turns, and real routers go on sharing.

The attacks are those of the benchmark; the Redis is real, time is the tests'.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis
from structlog.testing import capture_logs

from tests.parameters import one_in
from tests.router.garbled_fleet import Fleet, fleet
from tests.router.shared_state_rig import PREFIX, Clock, Router, keys_in, use
from trunkline.status import RequestRefused
from trunkline_bench.attacks.vectors import redis_entries
from trunkline_bench.servers.redis_server import RedisServer
from trunkline_bench.simulation.fleet.router import summed
from trunkline_router.quotas.convictions import CONVICTION_MS, Convictions
from trunkline_router.quotas.fleet import MOST_CREDITS, MOST_TENANTS, Neighbours
from trunkline_router.quotas.quota import WINDOW_MS, Quotas
from trunkline_router.quotas.redis_entries import MOST_CREDIT_BYTES, written_credits
from trunkline_router.quotas.redis_store import RedisStore
from trunkline_router.quotas.store import MAX_CONVICTIONS, NeighbourReport, SyncReply, WorkerKey
from trunkline_router.quotas.tenant_book import MOST_OTHERS, TenantBook
from trunkline_router.routing.credit import NO_CREDIT, Credit

MOST_PIECE_BYTES = 2 * MOST_CREDIT_BYTES  # one router's credits, with the backslashes of JSON in JSON
MOST_ANSWER_BYTES = 4 << 20


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What routers are told, in pieces, each of which is read in one turn of the loop."""
    heard: list[list[str]] = []
    read = RedisStore._sync_reply

    async def noted(self: RedisStore, pieces: list[str]) -> SyncReply:
        heard.append(pieces)
        return await read(self, pieces)

    monkeypatch.setattr(RedisStore, "_sync_reply", noted)
    return heard


@contextlib.asynccontextmanager
async def patient_fleet(redis: RedisServer) -> AsyncIterator[Fleet]:
    """Two routers that wait for Redis as long as a busy machine takes."""
    async with fleet(redis) as both:
        for router in both.routers:
            router.link.store._sync_timeout_s = 20.0  # type: ignore[attr-defined]
        yield both


async def put(both: Fleet, name: str, **how: Any) -> None:
    """By the clock of the test, as the attacks go by that of Redis."""
    keys = await both.key("")
    client = _WithClock(both.client, both.clock)
    await getattr(redis_entries, name)(client, keys, **how)


class _WithClock:
    def __init__(self, client: Redis, clock: Clock) -> None:
        self._client = client
        self._clock = clock

    async def time(self) -> tuple[int, int]:
        return int(self._clock.ms // 1000), int(self._clock.ms % 1000 * 1000)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


ATTACKS = {
    "put_leases": {},
    "put_routers": {},
    "put_talkative_routers": {},
    "put_convictions": {"count": 50_000},
    "put_wrong_types": {},
    "put_leases as many as are kept": {"count": 4_000},
    "put_leases more than are kept": {"count": 20_000},
    "put_routers as many as are kept": {"count": 1_000, "workers": 20},
    "put_convictions as many as are kept": {"count": 8_000},
}


@pytest.mark.parametrize("attack", one_in(3, ATTACKS))
async def test_what_is_read_in_one_turn_is_bounded_and_sharing_goes_on(
    redis: RedisServer, attack: str, answers: list[list[str]]
) -> None:
    async with patient_fleet(redis) as both:
        a, b = both.routers
        a.fleet.own = {WorkerKey("real", 1): Credit(3, 30)}
        for _ in range(2):
            await put(both, attack.split()[0], **ATTACKS[attack])
            await both.turn()
            assert all(router.is_reachable for router in both.routers)
        await both.turn()
        assert b.fleet.others.get(WorkerKey("real", 1)) == Credit(3, 30), "what real routers say is heard"
        both_read = [max(map(len, pieces)) for pieces in answers]
        assert max(both_read) <= MOST_PIECE_BYTES
        assert max(sum(map(len, pieces)) for pieces in answers) <= MOST_ANSWER_BYTES
        for router in both.routers:
            assert len(router.convictions._ends) <= MAX_CONVICTIONS
            assert sum(len(said.credits) for said in router._own.neighbours._reports.values()) <= MOST_CREDITS
            assert len(router.fleet.known) <= 4096
        both.clock.pass_s(5.0)
        await both.turn()
        await both.check_whole()


async def test_a_router_that_says_too_much_is_named_once_and_costs_the_others_nothing(redis: RedisServer) -> None:
    async with patient_fleet(redis) as both:
        with capture_logs() as lines:
            for _ in range(3):
                await put(both, "put_talkative_routers")
                await both.turn()
        said = [line for line in lines if "too large" in line["event"]]
        assert len({line["entry"] for line in said}) > 10
        assert len(said) <= 2 * redis_entries.TALKATIVE_ROUTERS
        assert not any(key.worker_id.startswith("worker-") for key in both.routers[0].fleet.others)


async def test_false_routers_lower_what_is_admitted_without_redis_to_a_32nd_and_no_further(redis: RedisServer) -> None:
    async with patient_fleet(redis) as both:
        router, quotas = both.routers[0], Quotas(requests_per_minute=320)
        for _ in range(2):
            await put(both, "put_routers", count=1_000)
            await both.turn()
        assert len(router._own.neighbours) > 900
        await router.link.store.close()
        admitted = 0
        for _ in range(320):
            try:
                use(await router.admit(quotas, tenant="fresh"), 10, 10)
                admitted += 1
            except RequestRefused:
                break
        assert admitted == 320 // (1 + MOST_OTHERS)


@given(
    others=st.integers(0, 10**9),
    requests=st.integers(1, 10_000),
    tokens=st.integers(1, 10**6),
    each=st.integers(1, 1000),
)
def test_of_what_is_left_of_a_quota_one_part_in_32_is_admitted_whoever_else_there_may_be(
    others: int, requests: int, tokens: int, each: int
) -> None:
    book, quotas = TenantBook(WINDOW_MS), Quotas(requests_per_minute=requests, tokens_per_minute=tokens)
    admitted = 0
    while admitted < 400:
        if book.judge_alone(quotas, each, others, 0.0) is not None:
            break
        book.admit(each, 0.0)
        admitted += 1
    assert admitted >= min(400, requests // (1 + MOST_OTHERS), tokens // each // (1 + MOST_OTHERS))


async def test_tens_of_thousands_of_false_convictions_push_out_no_real_one(redis: RedisServer) -> None:
    real = [number.to_bytes(16, "big") for number in range(10**30, 10**30 + 50)]
    async with patient_fleet(redis) as both:
        for fingerprint in real:
            both.routers[0].convict(fingerprint)
        await both.turn()
        for _ in range(2):
            await put(both, "put_convictions", count=50_000)
            await both.turn()
            for router in both.routers:
                assert all(router.is_convicted(fingerprint) for fingerprint in real)
        for _ in range(3):
            await both.turn()
        newcomer = Router(RedisStore(redis.url, "trunkline:", clock_ms=both.clock.now_ms), "c", both.clock)
        await newcomer.start()
        await newcomer.beat()
        assert all(newcomer.is_convicted(fingerprint) for fingerprint in real), "they are in Redis again"
        assert len(newcomer.convictions._ends) <= MAX_CONVICTIONS
        await newcomer.link.store.close()


async def test_convictions_that_somebody_deletes_are_there_again_with_the_next_beats(redis: RedisServer) -> None:
    async with patient_fleet(redis) as both:
        both.routers[0].convict(b"\x07" * 16)
        await both.turn()
        for _ in range(3):
            await both.client.delete(f"{PREFIX}convictions")
            for _ in range(3):
                await both.turn()
            assert await both.client.zcard(f"{PREFIX}convictions") == 1


def test_own_convictions_stay_whatever_others_say() -> None:
    convictions = Convictions()
    for number in range(100):
        convictions.add(b"own" + bytes([number]), 0.0, CONVICTION_MS // 2)
    convictions.next_report(0.0, is_beat=False)
    for turn in range(5):
        convictions.hear({f"{turn}-{number}".encode(): CONVICTION_MS for number in range(MAX_CONVICTIONS)}, 1.0)
    assert all(convictions.holds(b"own" + bytes([number]), 2.0) for number in range(100))
    assert len(convictions._ends) <= MAX_CONVICTIONS
    assert len(convictions.next_report(2.0, is_beat=True)) == 100


credits_of_one = st.dictionaries(
    st.builds(WorkerKey, st.sampled_from("abc"), st.integers(0, 3)),
    st.builds(Credit, st.integers(0, 5), st.integers(0, 2**53)),
    max_size=4,
)


@given(
    turns=st.lists(
        st.tuples(
            st.sets(st.sampled_from("xyz")),
            st.dictionaries(st.sampled_from("xyz"), credits_of_one, max_size=3),
            st.booleans(),
        ),
        max_size=12,
    )
)
def test_the_sums_of_what_others_have_sent_are_those_of_what_each_said_last(turns: list[Any]) -> None:
    neighbours = Neighbours()
    said: dict[str, dict[WorkerKey, Credit]] = {}
    for number, (alive, changes, forgets) in enumerate(turns):
        if forgets:
            neighbours.forget()
            said = {}
        alive = alive | changes.keys()
        neighbours.hear(
            SyncReply("life", tuple(alive), {n: NeighbourReport(number, c, [n]) for n, c in changes.items()})
        )
        said = {name: credits for name, credits in {**said, **changes}.items() if name in alive}
        wanted = {key: credit for key, credit in summed(said.values()).items() if credit != NO_CREDIT}
        assert neighbours.credits() == wanted
        assert neighbours.competing == said.keys()


def test_routers_that_say_too_much_together_are_heard_in_part_and_the_small_ones_in_full() -> None:
    neighbours = Neighbours()
    large = {WorkerKey(f"w{n}", n): Credit(1, 1) for n in range(MOST_CREDITS // 2)}
    small = NeighbourReport(1, {WorkerKey("real", 1): Credit(1, 7)}, ["tenant"])
    changed = {
        f"large-{number}": NeighbourReport(1, large, [f"{n}" for n in range(MOST_TENANTS // 2)]) for number in range(4)
    }
    neighbours.hear(SyncReply("life", (*changed, "small"), {**changed, "small": small}))
    assert neighbours.credits()[WorkerKey("real", 1)] == Credit(1, 7)
    assert "tenant" in neighbours.competing
    assert sum(len(said.credits) for said in neighbours._reports.values()) <= MOST_CREDITS
    assert len(neighbours.competing) <= MOST_TENANTS


@given(
    workers=st.integers(0, 3_000),
    tenants=st.integers(0, 2_000),
    name=st.sampled_from(["w", "é" * 100, "\U0001f9e0" * 90]),
)
def test_a_router_writes_no_more_than_others_read_and_keeps_what_weighs_most(
    workers: int, tenants: int, name: str
) -> None:
    credits = {WorkerKey(f"{name}{number}", number): Credit(1, number) for number in range(workers)}
    written = written_credits(credits, [f"{name}{number}" for number in range(tenants)])
    assert len(written) <= MOST_CREDIT_BYTES
    kept = json.loads(written)[0]
    if workers:
        assert max(tokens for *_, tokens in kept) == workers - 1
    if workers + tenants < 100:
        assert len(kept) == workers


async def test_a_router_spends_little_of_its_time_on_reading_however_often_something_is_new(redis: RedisServer) -> None:
    async with patient_fleet(redis) as both:
        router = both.routers[0]
        for _ in range(3):
            await put(both, "put_routers", count=1_000, workers=20)
            await both.turn()
            read_s = router.sync._read_s
            await router.sync.tick()
            assert router.sync.rest_s >= min(1.0, 10 * read_s) - 1e-9 or read_s == 0.0


async def test_the_attacks_of_the_benchmark_find_the_keys_of_a_fleet(redis: RedisServer) -> None:
    async with patient_fleet(redis) as both:
        await asyncio.gather(*(attack(redis.url, 0.0) for attack in redis_entries.ATTACKS.values()))
        assert (await keys_in(both.client)).startswith(redis_entries.PREFIX)
        assert redis_entries.PREFIX == PREFIX
