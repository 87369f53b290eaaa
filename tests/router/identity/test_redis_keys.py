"""API keys in Redis: the fleet's secret makes them, and nothing that happens to Redis unmakes or forges one."""

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import pytest
import redis.asyncio
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from tests.router.cluster import until
from tests.router.identity.key_rig import answer, record
from tests.router.identity.redis_rig import (
    FIRST,
    RECORDS,
    SECOND,
    VERSION,
    Opened,
    emptied,
    running_redis,
    seal_of,
    views,
)
from trunkline.status import NO_WORKER, RequestRefused
from trunkline_bench.servers.redis_server import RedisServer
from trunkline_router.access.identity import redis_keys
from trunkline_router.access.identity.authenticator import Authenticator
from trunkline_router.access.identity.redis_keys import PAGE_KEYS, POLL_S
from trunkline_router.access.keys.new_key import new_key
from trunkline_router.access.keys.redis_key_writer import RedisKeyWriter
from trunkline_router.quotas.store import StoreDown

SEAL, OTHER = seal_of(FIRST), seal_of(SECOND)
REVOKED = {"revoked": "2026-01-01T00:00:00Z"}
WRONG, WAS_REVOKED = "the API key is not valid", "the API key has been revoked"


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture
async def client(server: RedisServer) -> AsyncIterator[Any]:
    async with emptied(server) as client:
        yield client


@pytest.fixture
async def opened(server: RedisServer, client: Any) -> AsyncIterator[Opened]:
    async with views(server) as opened:
        yield opened


async def test_a_key_and_its_revocation_reach_every_router_at_its_next_poll(opened: Opened) -> None:
    assert POLL_S + redis_keys.ANSWER_TIMEOUT_S <= 2.5  # so a revocation counts within 5 s
    writer, routers, key = opened(), [opened(), opened()], new_key()
    fields = record(key)
    for change, wanted in (({}, "acme"), (REVOKED, WAS_REVOKED)):
        await writer.put(fields | change)
        for router in routers:
            await router.poll()
            assert answer(Authenticator([router]), key.credential) == wanted


async def test_a_running_router_follows_redis(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_keys, "POLL_S", 0.01)
    writer, router, key = opened(), opened(), new_key()
    authenticator = Authenticator([router])
    await authenticator.start()
    running = asyncio.create_task(authenticator.run())
    for change, wanted in (({}, "acme"), (REVOKED, WAS_REVOKED)):
        await writer.put(record(key) | change)
        async with asyncio.timeout(60):
            await until(lambda wanted=wanted: answer(authenticator, key.credential) == wanted)  # type: ignore[misc]
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_more_keys_than_a_page_are_read_and_an_unchanged_version_reads_none(opened: Opened, client: Any) -> None:
    writer, router = opened(), opened(steady_s=lambda: 5.0)
    keys = [new_key() for _ in range(3 * PAGE_KEYS)]
    for key in keys:
        await writer.put(record(key))
    await router.update()
    assert router.records.keys() == {key.key_id for key in keys}
    await client.config_resetstat()
    await router.update()
    stats = await client.info("commandstats")
    assert "cmdstat_hscan" not in stats
    assert "cmdstat_get" in stats


@pytest.mark.parametrize("seal", ["", "0" * 64 + ":", "none"])
async def test_a_record_that_the_fleet_did_not_seal_is_ignored(opened: Opened, client: Any, seal: str) -> None:
    key = new_key()
    text = json.dumps(record(key))
    await client.hset(RECORDS, key.key_id, OTHER.sealed(text) if seal == "none" else seal + text)
    router = opened()
    with capture_logs() as logs:
        await router.poll()
        router._version = ""
        await router.poll()
    assert answer(Authenticator([router]), key.credential) == WRONG
    assert [(entry["log_level"], entry["key_id"]) for entry in logs] == [("warning", key.key_id)]


async def test_a_sealed_record_counts_for_its_own_id_alone(opened: Opened, client: Any) -> None:
    """An attacker copies the record of a key that it has to the id of another one."""
    own, other = new_key(), new_key()
    await client.hset(RECORDS, other.key_id, SEAL.sealed(json.dumps(record(own, roles=["operator"]))))
    router = opened()
    await router.poll()
    assert router.records == {}


async def test_a_changed_record_is_ignored(opened: Opened, client: Any) -> None:
    writer, key = opened(), new_key()
    await writer.put(record(key))
    value = await client.hget(RECORDS, key.key_id)
    await client.hset(RECORDS, key.key_id, value.replace(b'"acme"', b'"best"'))
    router = opened()
    await router.poll()
    assert router.records == {}


async def test_an_old_record_that_is_put_back_does_not_undo_a_revocation(opened: Opened, client: Any) -> None:
    writer, router, key = opened(), opened(), new_key()
    await writer.put(record(key))
    old = await client.hget(RECORDS, key.key_id)
    await writer.put(record(key) | REVOKED)
    await router.poll()
    attacks: list[Callable[[], Awaitable[Any]]] = [
        partial(client.hset, RECORDS, key.key_id, old),
        partial(client.hset, RECORDS, key.key_id, b"garbage"),
        partial(client.hset, RECORDS, key.key_id, b"\xff not text"),
        partial(client.hset, RECORDS, key.key_id, b"x" * 100_000),
        partial(client.hdel, RECORDS, key.key_id),
        client.flushall,
    ]
    for number, attack in enumerate(attacks):
        await attack()
        await client.set(VERSION, number)
        await router.poll()
        assert answer(Authenticator([router]), key.credential) == WAS_REVOKED
        # The router has written the revoked record back, so that one that starts now knows it too.
        later = opened()
        await later.poll()
        assert answer(Authenticator([later]), key.credential) == WAS_REVOKED


async def test_an_emptied_redis_gets_its_keys_back(opened: Opened, client: Any) -> None:
    keys = [new_key() for _ in range(2 * PAGE_KEYS)]
    now_s = 0.0
    router = opened(steady_s=lambda: now_s)
    for key in keys:
        await router.put(record(key))
    await router.poll()
    await client.flushall()
    with capture_logs() as logs:
        await router.poll()
        now_s += redis_keys.READ_ALL_S  # also a router that sees the old version finds out
        await router.poll()
    assert await client.hlen(RECORDS) == len(keys)
    assert {entry["num_keys"] for entry in logs} == {len(keys)}
    assert all(answer(Authenticator([router]), key.credential) == "acme" for key in keys)


async def test_without_redis_the_known_keys_stay_valid_and_others_are_not_called_wrong(opened: Opened) -> None:
    key = new_key()
    with RedisServer() as server:
        router = RedisKeyWriter(server.url, "trunkline:", SEAL)
        await router.put(record(key))
        await router.poll()
        server.kill()
        with capture_logs() as logs:
            for _ in range(3):
                await router.poll()
            assert answer(Authenticator([router]), key.credential) == "acme"
            assert answer(Authenticator([router]), new_key().credential) == WRONG
            fresh = RedisKeyWriter(server.url, "trunkline:", SEAL)
            await fresh.start()
            with pytest.raises(RequestRefused) as caught:
                Authenticator([fresh]).identify(key.credential)
            assert (caught.value.reason, caught.value.retry_delay_ms) == (NO_WORKER, 1000)
            server.start()
            await router.poll()
        # Lost, for each of the two routers once; then back, and the keys with it.
        assert [entry["log_level"] for entry in logs] == ["warning", "warning", "warning", "info"]
        assert logs[2]["num_keys"] == 1
        await router.close()
        await fresh.close()


async def test_a_redis_that_hangs_blocks_no_request(server: RedisServer, opened: Opened) -> None:
    key, router = new_key(), opened()
    await router.put(record(key))
    await router.poll()
    server.hang()
    try:
        with capture_logs() as logs:
            polling = asyncio.create_task(router.poll())
            await asyncio.sleep(0)
            assert answer(Authenticator([router]), key.credential) == "acme"
            await polling
    finally:
        server.go_on()
    assert [entry["problem"].partition(": ")[2] for entry in logs] == ["no answer in time"]
    await router.poll()
    assert answer(Authenticator([router]), key.credential) == "acme"


async def test_a_server_that_is_no_redis_ends_with_one_log_line() -> None:
    served = asyncio.Semaphore(0)

    async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while await reader.read(65536):
                writer.write(b"*1000000000\r\n$5\r\nhello\r\n:1\r\n-ERR\r\n")
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        served.release()

    listening = await asyncio.start_server(answers, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    router = RedisKeyWriter(f"redis://127.0.0.1:{port}", "trunkline:", SEAL, connect_timeout_s=0.2)
    with capture_logs() as logs:
        for _ in range(2):
            await router.poll()
            await served.acquire()
    assert [entry["log_level"] for entry in logs] == ["warning"]
    await router.close()
    listening.close()


VALUES = st.one_of(
    st.binary(max_size=30), st.sampled_from([b"", b":", b"[" * 3000, b"x" * 20_000, b"\xff\xfe", b"null"]),
    st.sampled_from(["[]", "{}", "5", "[" * 9000, '{"id": "aaaaaaaaaaaa"}']).map(SEAL.sealed),
)  # fmt: skip
FIELDS = st.sampled_from([b"", b"aaaaaaaaaaaa", b"x" * 5000, b"\xff", b"tl-aaaaaaaaaaaa-x"])


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    entries=st.dictionaries(FIELDS, VALUES, max_size=4), version=st.none() | st.binary(max_size=100),
    kinds=st.tuples(st.sampled_from(["hash", "string", "list"]), st.booleans()),
)  # fmt: skip
@example(entries={b"aaaaaaaaaaaa": b"x"}, version=b"", kinds=("string", True))
async def test_whatever_lies_in_redis_the_known_keys_stay_valid(
    server: RedisServer, entries: dict[Any, Any], version: bytes | None, kinds: tuple[str, bool]
) -> None:
    client, router, key = (
        redis.asyncio.from_url(server.url),
        RedisKeyWriter(server.url, "trunkline:", SEAL),
        new_key(),
    )
    await client.flushall()
    await router.put(record(key))
    await router.update()
    await client.delete(RECORDS, VERSION)
    if kinds[0] == "string":
        await client.set(RECORDS, b"text")
    elif kinds[0] == "list":
        await client.rpush(RECORDS, b"text")
    elif entries:
        await client.hset(RECORDS, mapping=entries)
    if version is not None:
        await client.set(VERSION, version)
    if kinds[1]:
        await client.delete(VERSION)
        await client.rpush(VERSION, b"text")
    with capture_logs() as logs:
        for _ in range(2):
            await router.update()
    assert "tl-aaaaaaaaaaaa-x" not in str(logs)
    assert router.records.keys() == {key.key_id}
    await router.put(record(new_key()))  # what is in the way is replaced
    await router.update()
    assert len(router.records) == 2
    await router.close()
    await client.aclose()


async def test_the_number_of_keys_is_bounded(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_keys, "MOST_KEYS", 3)
    writer, router = opened(), opened()
    for _ in range(5):
        await writer.put(record(new_key()))
    with capture_logs() as logs:
        await router.poll()
    assert len(router.records) == 3
    assert len(logs) == 1


async def test_a_redis_that_cannot_be_reached_is_an_error_for_the_command() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        keys = RedisKeyWriter(f"redis://:canary@127.0.0.1:{taken.getsockname()[1]}", "trunkline:", SEAL)
        with pytest.raises(StoreDown) as caught:
            await keys.put(record(new_key()))
    assert "canary" not in str(caught.value)


async def test_redis_holds_no_secret(opened: Opened, client: Any) -> None:
    key = new_key()
    await opened().put(record(key))
    stored = [str(await client.hgetall(RECORDS)), str(await client.get(VERSION)), str(await client.keys("*"))]
    assert key.key_id in stored[0]
    assert key.secret not in "".join(stored)
