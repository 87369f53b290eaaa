"""The fleet's secret is changed while routers run: no key is refused at any step, and no revocation is lost."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.router.identity.key_rig import answer, record
from tests.router.identity.redis_rig import FIRST, RECORDS, SECOND, VERSION, Opened, emptied, running_redis, views
from trunkline_bench.servers.redis_server import RedisServer
from trunkline_router.identity.authenticator import Authenticator
from trunkline_router.identity.identity import IdentityError
from trunkline_router.identity.key_record import ApiKey
from trunkline_router.identity.redis_keys import PAGE_KEYS, READ_ALL_S, RedisKeys
from trunkline_router.stores.store import StoreDown

REVOKED = {"revoked": "2026-01-01T00:00:00Z"}
WAS_REVOKED = "the API key has been revoked"
OLD, BOTH, NEW = (FIRST,), (SECOND, FIRST), (SECOND,)


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


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def polled(clock: Clock, *routers: RedisKeys) -> None:
    """Each router reads everything, twice: what one of them writes, all have read in the end."""
    for _ in range(2):
        clock.now_s += READ_ALL_S
        for router in routers:
            await router.poll()


async def at_once() -> None:
    """No router polls."""


def answers(routers: list[RedisKeys], key: ApiKey) -> set[str]:
    return {answer(Authenticator([router]), key.credential) for router in routers}


async def test_at_each_step_of_a_change_every_router_knows_every_key_and_every_revocation(
    opened: Opened, client: Any
) -> None:
    clock, key, gone = Clock(), ApiKey.new(), ApiKey.new()
    command, fleet = opened(*OLD), [opened(*OLD, steady_s=clock) for _ in range(2)]
    for made in (key, gone):
        await command.put(record(made))
    with capture_logs() as logs:
        for step, (before, after) in enumerate([(OLD, BOTH), (BOTH, NEW)]):
            # A rolling restart: one router after the other starts with the new file.
            for number in range(len(fleet)):
                fleet[number] = opened(*after, steady_s=clock)
                version = await client.get(VERSION)
                await polled(clock, *fleet)
                assert answers(fleet, key) == {"acme"}, f"{before} → {after}"
                assert answers(fleet, gone) == ({WAS_REVOKED} if step else {"acme"})
                assert await client.get(VERSION) == version, (
                    "routers write nothing: they do not seal against each other"
                )
            if step == 0:
                await opened(*OLD).put(record(gone) | REVOKED)  # with the file of before
                assert await opened(*BOTH).reseal(at_once) == 2
                assert await opened(*BOTH).reseal(at_once) == 0
                await polled(clock, *fleet)
                assert answers(fleet, gone) == {WAS_REVOKED}
    assert logs == []


async def test_a_router_that_was_left_with_the_old_file_costs_no_key_and_is_told_of(opened: Opened) -> None:
    clock, key, command = Clock(), ApiKey.new(), opened(*BOTH)
    late, router = opened(*OLD, steady_s=clock), opened(*BOTH, steady_s=clock)
    await late.put(record(key))
    await polled(clock, late, router)
    with pytest.raises(IdentityError, match="does not have the current secret yet"):
        await command.reseal(lambda: polled(clock, late, router))
    for _ in range(2):
        await polled(clock, late, router)
        assert answers([late, router], key) == {"acme"}
    assert await opened(*BOTH).reseal(lambda: polled(clock, router)) == 1
    started = opened(*NEW)
    await started.poll()
    assert answers([started], key) == {"acme"}


async def test_a_record_with_the_old_seal_that_is_put_back_is_replaced(opened: Opened, client: Any) -> None:
    clock, keys = Clock(), [ApiKey.new() for _ in range(16)]  # the order of seals is no matter of luck
    router = opened(*BOTH, steady_s=clock)
    for key in keys:
        await opened(*OLD).put(record(key))
    old = await client.hgetall(RECORDS)
    await opened(*BOTH).reseal(at_once)
    new = await client.hgetall(RECORDS)
    assert all(old[name] != new[name] for name in old)
    await polled(clock, router)
    await client.hset(RECORDS, mapping=old)
    await polled(clock, router)
    assert await client.hgetall(RECORDS) == new


async def test_of_an_earlier_secret_nothing_counts_once_it_is_dropped(opened: Opened) -> None:
    key, router = ApiKey.new(), opened(*NEW)
    await opened(*OLD).put(record(key))
    with capture_logs() as logs:
        await router.poll()
    assert answers([router], key) == {"the API key is not valid"}
    assert [entry["problem"] for entry in logs] == ["it is not sealed with this fleet's secret"]


async def test_a_key_that_is_revoked_while_records_are_sealed_stays_revoked(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, command = ApiKey.new(), opened(*BOTH)
    await opened(*OLD).put(record(key))
    ask = command._ask

    async def after_a_revocation(script: Any, *arguments: Any) -> Any:
        if script is command._replace:
            monkeypatch.setattr(command, "_ask", ask)
            await opened(*OLD).put(record(key) | REVOKED)
        return await ask(script, *arguments)

    monkeypatch.setattr(command, "_ask", after_a_revocation)
    assert await command.reseal(at_once) == 1
    started = opened(*NEW)
    await started.poll()
    assert answers([started], key) == {WAS_REVOKED}


async def test_records_that_change_all_the_time_are_given_up(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    command = opened(*BOTH)
    await opened(*OLD).put(record(ApiKey.new()))

    async def replaces_nothing(script: Any, *arguments: Any) -> Any:
        return 0 if script is command._replace else await own(script, *arguments)

    own = command._ask
    monkeypatch.setattr(command, "_ask", replaces_nothing)
    with pytest.raises(StoreDown, match="change the records all the time"):
        await command.reseal(at_once)


async def test_more_keys_than_a_page_are_sealed(opened: Opened, client: Any) -> None:
    writer, count = opened(*OLD), 2 * PAGE_KEYS + 1
    for _ in range(count):
        await writer.put(record(ApiKey.new()))
    assert await opened(*BOTH).reseal(at_once) == count
    started = opened(*NEW)
    await started.poll()
    assert len(started.records) == count == await client.hlen(RECORDS)
