"""Anything may lie in Redis: no request fails for it, and shared state is whole again by itself.

Time is the tests'. Whoever writes garbage is no router: it knows the keys, and what is in them.
"""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from tests.parameters import one_in
from tests.router.garbled_fleet import fleet
from tests.router.shared_state_rig import PREFIX
from trunkline_bench.servers.redis_server import RedisServer
from trunkline_router.quotas.convictions import CONVICTION_MS
from trunkline_router.quotas.redis_entries import MAX_REPORTED, EntryReader
from trunkline_router.quotas.redis_store import KEYS_OF_A_LIFE, KEYS_OF_ALL_LIVES
from trunkline_router.quotas.store import TTL_MS, WorkerKey
from trunkline_router.routing.credit import Credit

KEYS = (*KEYS_OF_ALL_LIVES, *KEYS_OF_A_LIFE, "window:t", "flight:t")
TYPES = ("string", "list", "set", "hash", "zset", "stream")
# Where a number is wanted, of which Lua reads many.
NUMBERS = ("nan", "-nan", "inf", "-inf", "1e300", "-1e300", "1e-300", "0x1p9", "-1", "1.5", "9" * 14, "9" * 15,
           "9" * 16, "9" * 400, "-" + "9" * 15, "", " 1", "x", "\x00", "9223372036854775807")  # fmt: skip
TEXTS = (*NUMBERS, "|", "@", ":", "5|", "5|{}", "5|[]", '5|[[["w","5",1e999,1]],["t"]]', '5|[[["w","5",NaN,1]],[]]',
         '5|[[["w","5",true,[]]],[7,null,"\\ud800"]]', '5|[[[null]],0]', "5|" + "[" * 3000, b"\xff\xfe\x00|\x80",
         b"7|\xff", "x" * 1_100_000, "5|" + "x" * 1_100_000, "aa" * 16, "aa" * 3000, "\ud7ff\u2028")  # fmt: skip
FIELDS = ("{a}", "{b}", "{a}|refused", "r", "t", "first", "{bucket}", "leases", "convictions", "h:1", "no address",
          "x" * 9000, "[::1]:99999", b"\xff", "", "t2", "n/1")  # fmt: skip


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


fields = st.sampled_from(FIELDS)
values = st.sampled_from((*TEXTS, "{now}:nan", "{now}:5", "{now}|x", '{now}|["w","-7","m"]', '{now}|[{},[]]', "1e17@1",
                          "nan@5", "{now}@5", "5@99999999999999", "inf@1", "0x10@1"))  # fmt: skip
garbage = st.tuples(st.sampled_from(KEYS), st.sampled_from(TYPES), fields, values)


@settings(max_examples=20, deadline=None)
@given(pieces=st.lists(garbage, min_size=1, max_size=12), then=st.sampled_from(["left", "deleted", "emptied"]))
def test_whatever_lies_in_redis_no_request_fails_and_sharing_goes_on(
    redis: RedisServer, pieces: list[tuple[str, str, str | bytes, str | bytes]], then: str
) -> None:
    async def life() -> None:
        async with fleet(redis) as both:
            for piece in pieces:
                await both.put(*piece)
            for _ in range(3):
                await both.turn()
            for router in both.routers:
                assert router.is_reachable, "while it lies there"
            both.check_bounded()
            if then == "deleted":
                for name in {piece[0] for piece in pieces}:
                    await both.client.delete(await both.key(name))
            elif then == "emptied":
                await both.client.flushall()
            for _ in range(3):
                await both.turn()
            await both.check_whole()
            both.check_bounded()

    asyncio.run(life())


@pytest.mark.parametrize("name", KEYS)
async def test_every_key_may_be_of_any_other_type_and_is_said_once(redis: RedisServer, name: str) -> None:
    right = {"life": "string", "convictions": "zset"}.get(name, "hash")
    async with fleet(redis) as both:
        with capture_logs() as lines:
            for kind in TYPES:
                if kind != right:
                    for _ in range(2):
                        await both.put(name, kind, "field", "value")
                        await both.turn()
                        assert all(router.is_reachable for router in both.routers)
        said = [line for line in lines if line["event"].startswith("invalid content was cleared")]
        assert len(said) <= 2, "once for each router"
        assert said or name == "life", "a life that is none is one that has ended"
        await both.check_whole()


@pytest.mark.parametrize("name", one_in(3, [*KEYS_OF_A_LIFE, "window:t", "flight:t"]))
async def test_every_field_of_a_key_may_hold_anything(redis: RedisServer, name: str) -> None:
    async with fleet(redis) as both:
        for value in TEXTS:
            fields = [*FIELDS, *await both.client.hkeys(await both.key(name))]
            for field in dict.fromkeys(fields):
                await both.put(name, "hash", field, value)
            await both.turn()
            assert all(router.is_reachable for router in both.routers), repr(value[:20])
        both.check_bounded()
        await both.check_whole()


@pytest.mark.parametrize("name", one_in(3, [*KEYS_OF_A_LIFE, "window:t", "flight:t", "convictions"]))
async def test_a_key_that_grew_beyond_all_measure_is_cleared(redis: RedisServer, name: str) -> None:
    async with fleet(redis) as both:
        key = await both.key(name)
        entry = f"{int(both.clock.ms) + 60_000}"
        value = {"routers": f"{entry}:1", "leases": f'{entry}|["w", "1", "m"]', "served": f"5000@{entry}"}.get(
            name, "1|"
        )
        for start in range(0, 80_000, 20_000):
            numbers = range(start, start + 20_000)
            if name == "convictions":
                await both.client.zadd(key, {f"{number:032x}": float(entry) for number in numbers})
            else:
                await both.client.hset(key, mapping={f"10.0.0.1:{number}": value for number in numbers})
        await both.turn()
        await both.turn()
        size = both.client.zcard if name == "convictions" else both.client.hlen
        assert await size(await both.key(name)) < 5000
        await both.check_whole()
        both.check_bounded()


async def test_a_forged_end_of_a_conviction_is_heard_by_nobody_and_outlives_nothing(redis: RedisServer) -> None:
    async with fleet(redis) as both:
        for score in (1e300, float("inf"), both.clock.ms + 3 * CONVICTION_MS):
            await both.client.zadd(PREFIX + "convictions", {"aa" * 16: score})
            await both.client.hincrby(await both.key("versions"), "convictions", 1)
            await both.turn()
            assert not any(router.is_convicted(b"\xaa" * 16) for router in both.routers)
            await both.check_whole()
            await both.client.flushall()
            await both.turn()
            await both.check_whole()


async def test_a_router_whose_credits_were_overwritten_says_them_again(redis: RedisServer) -> None:
    async with fleet(redis) as both:
        a, b = both.routers
        a.fleet.own = {WorkerKey("w", 1): Credit(2, 50)}
        await both.turn()
        await both.turn()
        await both.client.hset(await both.key("credits"), a.link.name, "999|[[],[]]")
        await both.turn()
        await both.turn()
        assert b.fleet.others == {WorkerKey("w", 1): Credit(2, 50)}


async def test_routers_that_nobody_is_are_forgotten_with_all_they_said(redis: RedisServer) -> None:
    async with fleet(redis) as both:
        now = int(both.clock.ms)
        for number, expires in enumerate((now + 10**9, 9 * 10**15, now + TTL_MS)):
            await both.client.hset(await both.key("routers"), f"n/{number}", f"{expires}:0")
            await both.client.hset(await both.key("credits"), f"n/{number}", f'{number}|[[["w", "1", 5, 5]], []]')
        await both.client.hset(await both.key("credits"), "n/7", "1|[[], []]")
        await both.turn()
        assert len(both.routers[0]._own.neighbours) == 2, "the one whose time is possible, and the other router"
        await both.turn()
        await both.turn()
        assert len(both.routers[0]._own.neighbours) == 1
        assert len(await both.client.hkeys(await both.key("credits"))) == 2


@example(ttl_ms=1e300)
@example(ttl_ms=float("inf"))
@example(ttl_ms=float("nan"))
@given(
    ttl_ms=st.one_of(st.floats(), st.integers(), st.none(), st.text(max_size=5), st.lists(st.integers(), max_size=2))
)
def test_a_conviction_is_heard_with_a_time_to_live_that_routers_give_or_not_at_all(ttl_ms: Any) -> None:
    heard = EntryReader().conviction("aa" * 16, ttl_ms)
    assert heard is None or (heard[0] == b"\xaa" * 16 and 0 <= heard[1] <= CONVICTION_MS)


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


@given(text=st.one_of(st.text(), st.none(), json_values.map(json.dumps)), version=st.integers(0))
def test_entries_are_read_or_left_out_and_never_raise(text: Any, version: int) -> None:
    reader = EntryReader()
    report = reader.neighbour_report("n", version, text)
    assert all(credit.choices >= 0 and credit.tokens >= 0 for credit in report.credits.values())
    assert all(isinstance(name, str) for name in report.competing)
    lease = reader.lease("h:1", text)
    assert lease is None or 0 <= lease.epoch < 2**64
    assert reader.lease(text, '["w", "1", "m"]') is None or str(text).rpartition(":")[2].isdigit()
    reader.served("t", text)
    reader.conviction(text, 5)


def test_what_was_complained_of_is_remembered_within_bounds() -> None:
    reader = EntryReader()
    with capture_logs() as lines:
        for number in range(3 * MAX_REPORTED):
            reader.lease(f"h:{number % 60_000 + 1}", "nonsense")
            reader.warn("invalid content", "key")
    assert len(reader._reported) <= MAX_REPORTED
    assert 3 * MAX_REPORTED <= len(lines) <= 3 * MAX_REPORTED + 5
