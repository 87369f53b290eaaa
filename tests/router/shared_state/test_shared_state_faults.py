"""The store is lost, hangs, forgets: no request may fail for it, and what was shared comes back by itself."""

import asyncio
import json
import time
from functools import partial
from random import Random
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import MovedError, ResponseError
from structlog.testing import capture_logs

from tests.router.cluster import until
from tests.router.embedded_store import EmbeddedStore
from tests.router.running_routers import RunningRouter, running
from tests.router.shared_state_rig import PREFIX, Clock, Router, keys_in, use
from trunkline.status import RequestRefused
from trunkline_bench.servers.ports import free_port, lowest_outgoing
from trunkline_bench.servers.redis_server import RedisServer
from trunkline_router.quotas.admission import RequestUse
from trunkline_router.quotas.quota import Quotas
from trunkline_router.quotas.redis_connection import CONNECT_TIMEOUT_S, RedisConnection, Script
from trunkline_router.quotas.redis_url import place_of, redis_url_problem
from trunkline_router.quotas.store import Answer, Lease, WorkerKey
from trunkline_router.quotas.store_link import Breaker
from trunkline_router.routing.credit import Credit

WORKER = WorkerKey("w", 5)
LEASE = Lease("10.0.0.1:50061", "w", 5, "tiny")
PATIENCE_S = 0.005


async def keys_of(server: RedisServer) -> dict[str, int]:
    """ms to live by key."""
    async with Redis.from_url(server.url, decode_responses=True) as client:
        return {str(key): await client.pttl(key) for key in await client.keys()}


async def counted(server: RedisServer) -> tuple[int, int]:
    """Requests and tokens in tenant t's window, as Redis has it."""
    async with Redis.from_url(server.url, decode_responses=True) as client:
        requests, tokens = await client.hmget(await keys_in(client) + "window:t", "r", "t")
        return int(requests or 0), int(tokens or 0)


async def until_probed(router: RunningRouter) -> None:
    """Two probes have failed."""
    breaker = router.link.breaker
    for _ in range(2):
        due_s = breaker._probe_at_s
        await until(lambda: breaker._probe_at_s > due_s)  # noqa: B023


# The breaker


def test_a_breaker_opens_after_three_late_answers_one_after_another() -> None:
    breaker = Breaker(Random(0))
    breaker.probe_succeeded()
    assert [breaker.was_late(1.0, 1.1), breaker.was_late(1.2, 1.3)] == [False, False]
    breaker.answered()
    assert [breaker.was_late(2.0, 2.1), breaker.was_late(2.2, 2.3), breaker.was_late(2.4, 2.5)] == [False, False, True]
    assert breaker.is_open
    assert not breaker.was_late(2.6, 2.7), "it is open already"


def test_calls_that_were_late_together_prove_one_thing() -> None:
    breaker = Breaker(Random(0))
    breaker.probe_succeeded()
    assert not any(breaker.was_late(1.0 + call / 1000, 1.1) for call in range(50))
    assert not breaker.was_late(1.2, 1.3)
    assert breaker.was_late(1.4, 1.5)


def test_a_lost_connection_opens_a_breaker_at_once_and_a_probe_closes_it() -> None:
    breaker = Breaker(Random(0))
    assert breaker.is_open, "until it is known that the store is there"
    assert breaker.probe_in_s(0.0) == 0.0
    breaker.probe_succeeded()
    assert breaker.broke(20.0)
    assert 0.5 <= breaker.probe_in_s(20.0) <= 1.0
    breaker.probe_succeeded()
    assert not breaker.is_open
    assert breaker.times_opened == 1


def test_a_lost_store_is_probed_about_once_a_second() -> None:
    breaker = Breaker(Random(0))
    breaker.probe_succeeded()
    breaker.broke(20.0)
    for turn in range(8):
        breaker.probe_failed(20.0 + turn)
        assert 0.5 <= breaker.probe_in_s(20.0 + turn) <= 1.0


# Redis killed, hung, empty


async def test_a_hung_redis_costs_a_request_five_milliseconds_and_soon_nothing(redis: RedisServer) -> None:
    """By the shortest of several waits: what makes others longer is a busy machine."""
    quotas = Quotas(requests_per_minute=1000)
    async with running(redis.url, *"abcd") as routers:
        for router in routers:
            assert await router.admits(quotas)
        redis.hang()
        waits: list[list[float]] = []
        for _ in range(10):
            waits.append([])
            for router in routers:
                began_s = time.perf_counter()
                assert await router.admits(quotas)
                waits[-1].append(time.perf_counter() - began_s)
        assert PATIENCE_S <= min(waits[0]) < 20 * PATIENCE_S < CONNECT_TIMEOUT_S
        assert not any(router.is_reachable for router in routers)
        assert min(min(waits[3:])) < PATIENCE_S
        late = sum(router.link.late_answers for router in routers)
        assert 4 <= late <= 3 * 4
        redis.go_on()
        await until(lambda: all(router.is_reachable for router in routers))
        for router in routers:
            await router.close()
    asked = [4 * 11 + again for again in range(late + 1)]
    assert await counted(redis) in [(requests, 20 * requests) for requests in asked]


async def test_answers_that_come_late_count_their_requests_once(redis: RedisServer) -> None:
    async with running(redis.url, "a") as (router,):
        redis.hang()
        assert await router.admits(Quotas(requests_per_minute=1000))
        assert await router.admits(Quotas(requests_per_minute=1000))
        assert router.is_reachable, "two late answers are not enough to say that it is lost"
        redis.go_on()
        syncs = router.syncs
        await until(lambda: router.syncs > syncs + 2)
        assert (await counted(redis)) == (2, 40)


async def test_a_request_that_goes_away_while_redis_is_asked_leaves_nothing(redis: RedisServer) -> None:
    quotas = Quotas(requests_per_minute=1000, tokens_in_flight=100)
    async with running(redis.url, "a", "b") as (router, other):
        redis.hang()
        task = asyncio.create_task(router.admit(quotas))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        redis.go_on()
        syncs = router.syncs
        await until(lambda: router.syncs > syncs + 2)
        assert (await counted(redis)) == (0, 0)
        await other.admit(quotas, 100, 0)


async def test_after_a_restart_without_memory_everything_is_entered_again(redis: RedisServer) -> None:
    quotas = Quotas(requests_per_minute=10, tokens_in_flight=100)
    async with running(redis.url, "a", "b") as (a, b):
        for turn in range(10):
            assert await (a, b)[turn % 2].admits(quotas)
        running_one = await a.reserve(
            "long", Quotas(tokens_in_flight=50), RequestUse(20, 30, most_tokens=99, choices=1), weight=1.0
        )
        a.fleet.own, a.fleet.own_leases = {WORKER: Credit(2, 300)}, [LEASE]
        a.convict(b"poison")
        await until(lambda: b.fleet.others == {WORKER: Credit(2, 300)} and b.is_convicted(b"poison"))
        redis.kill()
        await until(lambda: not a.is_reachable and not b.is_reachable)
        redis.start()
        await until(lambda: a.is_reachable and b.is_reachable)
        syncs = b.syncs
        await until(lambda: b.syncs > syncs + 1)
        assert (a.times_entered, b.times_entered) == (2, 2)
        assert not await a.admits(quotas), "what both had admitted counts again"
        assert not await b.admits(quotas)
        with pytest.raises(RequestRefused) as caught:
            await b.reserve("long", Quotas(tokens_in_flight=50), RequestUse(1, 1, most_tokens=9, choices=1), weight=1.0)
        assert caught.value.quota == "long/tokens_in_flight"
        await until(lambda: b.fleet.others == {WORKER: Credit(2, 300)} and list(b.fleet.known) == [LEASE])
        async with Redis.from_url(redis.url, decode_responses=True) as client:
            assert await client.zrange(PREFIX + "convictions", 0, -1) == [b"poison".hex()]
        use(running_one, 20, 30)


async def test_an_empty_redis_hears_of_running_requests_also_while_it_is_asked_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quotas, clock = Quotas(tokens_in_flight=100), Clock()
    store = EmbeddedStore(clock.now_ms)
    a, b = Router(store, "a", clock), Router(store, "b", clock)
    for router in (a, b):
        await router.start()
    running_one = await a.admit(quotas, 50, 30)
    answer: asyncio.Future[Answer | None] = asyncio.get_running_loop().create_future()
    with monkeypatch.context() as patched:
        patched.setattr(store, "reserve", lambda _: answer)
        asking = asyncio.create_task(a.admit(quotas))
        await asyncio.sleep(0)
    store.forget()
    await a.beat()
    await b.beat()
    with pytest.raises(RequestRefused):
        await b.admit(quotas, 20, 20)
    answer.set_result(None)  # the new life has counted nothing
    use(await asking, 10, 10)
    use(running_one, 50, 30)


async def test_a_redis_that_comes_back_with_an_older_snapshot_has_forgotten_nothing_that_counts(
    redis: RedisServer,
) -> None:
    quotas = Quotas(requests_per_minute=10)
    async with running(redis.url, "a", "b") as (a, b):
        for turn in range(3):
            assert await (a, b)[turn % 2].admits(quotas)
        for router in (a, b):
            syncs = router.syncs
            await until(partial(lambda router, syncs: router.syncs > syncs, router, syncs))
        async with Redis.from_url(redis.url) as client:
            await client.save()
        assert [await (a, b)[turn % 2].admits(quotas) for turn in range(8)] == [True] * 7 + [False]
        a.fleet.own, a.fleet.own_leases = {WORKER: Credit(2, 300)}, [LEASE]
        a.convict(b"poison")
        await until(lambda: b.fleet.others == {WORKER: Credit(2, 300)} and b.is_convicted(b"poison"))
        redis.kill()
        await until(lambda: not a.is_reachable and not b.is_reachable)
        redis.start()
        assert any(key.endswith(":window:t") for key in await keys_of(redis)), "it is back with what it had saved"
        await until(lambda: a.is_reachable and b.is_reachable)
        await until(lambda: (a.times_entered, b.times_entered) == (2, 2))
        assert not await a.admits(quotas), "what both had admitted counts, and counts once"
        assert not await b.admits(quotas)
        assert (await counted(redis))[0] == 10
        await until(lambda: b.fleet.others == {WORKER: Credit(2, 300)} and list(b.fleet.known) == [LEASE])
        async with running(redis.url, "c") as (new,):
            await until(lambda: new.is_convicted(b"poison"))


async def test_convictions_outlive_all_routers_and_a_restart_of_redis_that_saves(redis: RedisServer) -> None:
    async with running(redis.url, "a") as (router,):
        router.convict(b"poison")
        await until(lambda: not router.convictions.has_new and router.syncs > 1)
        syncs = router.syncs
        await until(lambda: router.syncs > syncs)
    async with Redis.from_url(redis.url) as client:
        await client.save()
    redis.kill()
    redis.start()
    async with running(redis.url, "b") as (router,):
        await until(lambda: router.is_convicted(b"poison"))


async def test_what_is_admitted_while_redis_is_away_counts_when_it_is_back(redis: RedisServer) -> None:
    quotas = Quotas(requests_per_minute=10)
    async with running(redis.url, "a", "b") as (a, b):
        for turn in range(4):
            assert await (a, b)[turn % 2].admits(quotas)
        redis.kill()
        await until(lambda: not a.is_reachable and not b.is_reachable)
        assert [await a.admits(quotas) for _ in range(3)] == [True] * 3
        redis.start()
        await until(lambda: a.is_reachable and b.is_reachable)
        syncs = a.syncs
        await until(lambda: a.syncs > syncs)
        assert [await b.admits(quotas) for _ in range(5)] == [True] * 3 + [False] * 2


async def test_a_short_silence_does_not_open_the_quotas(redis: RedisServer) -> None:
    quotas = Quotas(requests_per_minute=10)
    async with running(redis.url, "a", "b") as (a, b):
        for _ in range(9):
            assert await b.admits(quotas)
        assert await a.admits(quotas)
        assert not await a.admits(quotas)
        redis.kill()
        await until(lambda: not a.is_reachable)
        assert not await a.admits(quotas), "it has heard that the others have used nine"


async def test_without_redis_from_the_start_a_router_counts_alone(redis: RedisServer) -> None:
    redis.kill()
    quotas = Quotas(requests_per_minute=2)
    async with running(redis.url, "a") as (router,):
        assert [await router.admits(quotas) for _ in range(3)] == [True, True, False]
        redis.start()
        await until(lambda: router.is_reachable)
        assert not await router.admits(quotas), "and has told what it admitted"


async def test_closed_quotas_refuse_while_redis_is_away_with_a_time_to_come_back(redis: RedisServer) -> None:
    quotas = Quotas(requests_per_minute=2)
    redis.kill()
    async with running(redis.url, "a", admits_when_down=False) as (router,):
        with pytest.raises(RequestRefused, match="cannot be checked now") as caught:
            await router.admit(quotas)
        assert (caught.value.reason, caught.value.retry_delay_ms) == ("QUOTA_EXCEEDED", 1000)
        assert await router.admits(Quotas()), "a tenant without quotas is not affected"
        redis.start()
        await until(lambda: router.is_reachable)
        assert await router.admits(quotas)


async def test_redis_may_forget_its_scripts(redis: RedisServer) -> None:
    async with running(redis.url, "a") as (router,), Redis.from_url(redis.url) as client:
        await client.script_flush()
        results = await asyncio.gather(*(router.admits(Quotas(requests_per_minute=5)) for _ in range(8)))
        assert sorted(results) == [False] * 3 + [True] * 5
        await until(lambda: router.times_lost == 1 and router.is_reachable)
        assert not await router.admits(Quotas(requests_per_minute=5))
        assert await counted(redis) == (5, 100)


async def test_a_redis_that_refuses_to_write_is_left_and_asked_anew(redis: RedisServer) -> None:
    async with running(redis.url, "a") as (router,), Redis.from_url(redis.url) as client:
        await client.replicaof("127.0.0.1", 1)
        assert await router.admits(Quotas(requests_per_minute=5))
        await until(lambda: not router.is_reachable)
        await client.replicaof("NO", "ONE")
        await until(lambda: router.is_reachable)
        assert [await router.admits(Quotas(requests_per_minute=5)) for _ in range(5)] == [True] * 4 + [False]


async def test_a_full_redis_is_left_for_the_routers_own_book_until_there_is_room(redis: RedisServer) -> None:
    quotas = Quotas(requests_per_minute=5)
    async with running(redis.url, "a", "b") as (a, b), Redis.from_url(redis.url) as client:
        assert [await a.admits(quotas) for _ in range(4)] == [True] * 4
        await client.config_set("maxmemory", 1)
        await until(lambda: not a.is_reachable and not b.is_reachable)
        lost = a.times_lost
        assert [await a.admits(quotas) for _ in range(2)] == [True, False], "nothing is forgotten"
        await until_probed(a)
        assert a.times_lost == lost, "it is not taken for back as long as it is full"
        await client.config_set("maxmemory", 0)
        await until(lambda: a.is_reachable and b.is_reachable)
        syncs = a.syncs
        await until(lambda: a.syncs > syncs)
        assert not await b.admits(quotas)


async def test_a_full_redis_refuses_whose_quotas_are_closed(redis: RedisServer) -> None:
    async with running(redis.url, "a", admits_when_down=False) as (router,), Redis.from_url(redis.url) as client:
        assert await router.admits(Quotas(requests_per_minute=5))
        await client.config_set("maxmemory", 1)
        await until(lambda: not router.is_reachable)
        assert not await router.admits(Quotas(requests_per_minute=5))


async def test_a_redis_that_evicts_is_warned_of_once() -> None:
    options = ("--maxmemory", "64mb", "--maxmemory-policy", "volatile-ttl")
    with RedisServer(options=options) as server, capture_logs() as lines:
        async with running(server.url, "a") as (router,):
            server.kill()
            await until(lambda: not router.is_reachable)
            server.start()
            await until(lambda: router.is_reachable)
    warnings = [line for line in lines if line["event"].startswith("Redis evicts")]
    assert [line["entry"] for line in warnings] == ["volatile-ttl"]
    assert "noeviction" in warnings[0]["event"]


async def test_every_key_expires_and_lies_in_one_slot(redis: RedisServer) -> None:
    async with running(redis.url, "a") as (router,):
        router.fleet.own, router.fleet.own_leases = {WORKER: Credit(2, 300)}, [LEASE]
        router.convict(b"poison")
        reservation = await router.admit(Quotas(requests_per_minute=5))
        router._own.served.add("t", 5000.0)
        await until(lambda: router.syncs >= 3)
        router.sync.beat_next()
        syncs = router.syncs
        await until(lambda: router.syncs > syncs)
        times = await keys_of(redis)
        async with Redis.from_url(redis.url, decode_responses=True) as client:
            keys = await keys_in(client)
        use(reservation, 10, 10)
    names = {"life", "routers", "credits", "versions", "leases", "convictions", "served", "window:t", "flight:t"}
    assert {key.removeprefix(keys).removeprefix(PREFIX) for key in times} == names
    assert all(ttl_ms > 0 for ttl_ms in times.values()), times


def cluster_port() -> int:
    """A free one whose cluster bus, 10,000 above, no outgoing connection is given either."""
    while (port := free_port()) + 10_000 >= lowest_outgoing():
        pass
    return port


async def is_moved(client: Redis, key: str) -> bool:
    """Whether a node of a cluster knows that another one has the key."""
    try:
        await client.get(key)
    except ResponseError as error:
        return isinstance(error, MovedError)
    return False


async def test_a_node_of_a_redis_cluster_is_refused_in_one_line_that_says_what_is_needed() -> None:
    options = ("--cluster-enabled", "yes", "--cluster-require-full-coverage", "no")
    with (
        RedisServer(options=options, port=cluster_port()) as keeper,
        RedisServer(options=options, port=cluster_port()) as other,
        capture_logs() as lines,
    ):
        async with Redis.from_url(keeper.url) as client, Redis.from_url(other.url, decode_responses=True) as asked:
            execute: Any = client.execute_command  # which has no types
            await execute("CLUSTER", "ADDSLOTS", *range(16384))
            await execute("CLUSTER", "MEET", "127.0.0.1", other.port)
            async with asyncio.timeout(60):
                while not await is_moved(asked, PREFIX + "life"):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        async with running(other.url, "a") as (router,):
            assert not router.is_reachable
            assert await router.admits(Quotas(requests_per_minute=5))
    assert [line["event"] for line in lines] == ["shared state lost"]
    assert lines[0]["problem"].endswith(
        "a Redis Cluster node, which is not supported: --redis-url must name a single primary"
    )


@pytest.mark.parametrize("option", ["", "?socket_timeout=5"])
async def test_a_connection_can_be_closed_at_any_moment_of_a_call(redis: RedisServer, option: str) -> None:
    script = Script("echo", "return ARGV[1]")
    connection = RedisConnection(redis.url + option, (script,))
    for turns in range(60):
        await connection.connect()
        reply = connection.call(script, (), (turns,))
        for _ in range(turns % 12):
            await asyncio.sleep(0)
        async with asyncio.timeout(60):
            await connection.close()
        assert reply.done()
        assert reply.exception() is not None or reply.result() == str(turns)


# Other routers, perhaps of another version


async def write_as_another_router(server: RedisServer, workers: object, *more: object) -> None:
    """What router b would have in Redis."""
    async with Redis.from_url(server.url, decode_responses=True) as client:
        keys = await keys_in(client)
        await client.hset(keys + "routers", "b/1", f"{int(time.time() * 1e3) + 60_000}:7")
        await client.hset(keys + "credits", "b/1", "7|" + json.dumps([workers, ["acme"], *more]))


async def test_what_a_later_version_says_more_is_not_looked_at(redis: RedisServer) -> None:
    async with running(redis.url, "a") as (router,):
        await write_as_another_router(redis, [["w", "5", 1, 300, "interactive"]], {"more": 1})
        await until(lambda: router.fleet.others == {WORKER: Credit(1, 300)})
        assert router._own.neighbours.competing == {"acme"}


async def test_an_entry_that_makes_no_sense_is_left_out_by_itself_and_said_once(redis: RedisServer) -> None:
    nonsense = [["w"], 7, {"w": 1}, ["v", "x", 1, 1], ["v", "6", "many", 1], ["v", "6", -1, 1], [None, "6", 1, 1]]
    with capture_logs() as lines:
        async with running(redis.url, "a") as (router,), Redis.from_url(redis.url, decode_responses=True) as client:
            keys = await keys_in(client)
            await client.hset(keys + "leases", "h:1", f"{int(time.time() * 1e3) + 60_000}|[1, 2]")
            await client.hset(keys + "leases", "h:2", "soon")
            await client.zadd(PREFIX + "convictions", {"no hex": time.time() * 1e3 + 60_000})
            await client.hset(keys + "served", "acme", "much")
            await client.hset(keys + "flight:t", "b/1", "much")
            await write_as_another_router(redis, [*nonsense, ["w", "5", 1, 300]])
            router.fleet.own_leases = [LEASE]
            router.convict(b"poison")
            await until(lambda: router.fleet.others == {WORKER: Credit(1, 300)} and list(router.fleet.known) == [LEASE])
            assert await router.admits(Quotas(tokens_in_flight=100))
            syncs = router.syncs
            await until(lambda: router.syncs > syncs + 2)
            assert router.times_lost == 0
    said = [line["entry"] for line in lines]
    assert sorted(said) == ["convictions", "credits of b/1", "lease of h:1"]


async def test_a_router_goes_on_without_the_store_where_it_meets_what_nobody_foresaw(redis: RedisServer) -> None:
    with capture_logs() as lines:
        async with running(redis.url, "a") as (router,):
            told, router.fleet.take_leases = router.fleet.take_leases, None  # type: ignore[method-assign, assignment]
            router.fleet.own_leases = [LEASE]
            await until(lambda: router.times_lost == 1)
            await until_probed(router)
            assert [await router.admits(Quotas(requests_per_minute=1)) for _ in range(2)] == [True, False]
            router.fleet.take_leases = told  # type: ignore[method-assign]
            await until(lambda: router.is_reachable)
    assert [line["event"] for line in lines] == ["unexpected error", "shared state lost", "shared state back"]


async def test_routers_of_different_formats_share_nothing(redis: RedisServer) -> None:
    async with running(redis.url, "a") as (router,), Redis.from_url(redis.url) as client:
        await until(lambda: router.syncs > 0)
        assert all(isinstance(key, bytes) and key.startswith(PREFIX.encode()) for key in await client.keys())


# Words


async def test_losing_redis_is_said_once_and_so_is_its_return(redis: RedisServer) -> None:
    with capture_logs() as lines:
        async with running(redis.url, "a") as (router,):
            redis.kill()
            await until(lambda: not router.is_reachable)
            await until_probed(router)
            redis.start()
            await until(lambda: router.is_reachable)
    assert [line["event"] for line in lines] == ["shared state lost", "shared state back"]


async def test_a_password_is_used_and_never_said() -> None:
    with RedisServer(password="hunter2secret") as server, capture_logs() as lines:
        async with running(server.url, "a") as (router,):
            assert router.is_reachable
            server.kill()
            await until(lambda: not router.is_reachable)
        wrong = server.url.replace("hunter2secret", "wrong-secret")
        server.start()
        async with running(wrong, "b") as (router,):
            assert not router.is_reachable
    assert [line["event"] for line in lines] == ["shared state lost"] * 2
    assert "secret" not in str(lines)
    assert place_of("rediss://u:secret@host/3?x=1") == "host:6379"


@pytest.mark.parametrize(
    "url", ["http://u:secret@h", "redis://", "redis://u:secret@h:0", "redis://u:secret@h:x", "unix://", "secret",
            "redis://:secret@h/0?socket_timeout=secret"],
)  # fmt: skip
def test_a_url_that_makes_no_sense_is_refused_without_repeating_it(url: str) -> None:
    problem = redis_url_problem(url)
    assert problem is not None
    assert "--redis-url" in problem
    assert "secret" not in problem
    assert "\n" not in problem


@pytest.mark.parametrize("url", ["redis://h", "redis://u:p%40@[::1]:7000/3", "rediss://h:1", "unix:///run/redis.sock"])
def test_urls_of_all_kinds_are_taken(url: str) -> None:
    assert redis_url_problem(url) is None
