"""The fleet's secret is changed while routers run: as planned, no key is refused at any step and no revocation is lost;
after a leak, nothing that the old secret sealed counts."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.parameters import one_in
from tests.router.identity.key_rig import answer, record
from tests.router.identity.redis_rig import FIRST, RECORDS, SECOND, VERSION, Opened, emptied, running_redis, views
from trunkline_bench.servers.redis_server import RedisServer
from trunkline_router.access.identity import redis_keys
from trunkline_router.access.identity.api_keys import ApiKey
from trunkline_router.access.identity.authenticator import Authenticator
from trunkline_router.access.identity.identity import IdentityError, Role
from trunkline_router.access.identity.redis_keys import ANSWER_TIMEOUT_S, PAGE_KEYS, POLL_S, READ_ALL_S
from trunkline_router.access.keys.new_key import new_key
from trunkline_router.access.keys.redis_key_writer import RedisKeyWriter
from trunkline_router.quotas.store import StoreDown

REVOKED = {"revoked": "2026-01-01T00:00:00Z"}
WAS_REVOKED = "the API key has been revoked"
NOT_VALID = "the API key is not valid"
OLD, ADDED, SWAPPED, NEW = (FIRST,), (FIRST, SECOND), (SECOND, FIRST), (SECOND,)  # the file's lines at each step


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers wait for Redis however busy the machine is: a poll without an answer would change nothing."""
    monkeypatch.setattr(redis_keys, "ANSWER_TIMEOUT_S", 60.0)


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


async def polled(clock: Clock, *routers: RedisKeyWriter) -> None:
    """Each router reads everything, twice: what one of them writes, all have read in the end."""
    for _ in range(2):
        clock.now_s += READ_ALL_S
        for router in routers:
            await router.poll()


async def at_once() -> None:
    """No router polls."""


def answers(routers: list[RedisKeyWriter], key: ApiKey) -> set[str]:
    return {answer(Authenticator([router]), key.credential) for router in routers}


class Fleet:
    """Routers of a fleet, and `trunkline keys` beside them."""

    def __init__(self, opened: Opened, order: int) -> None:
        self.opened = opened
        self.order = order  # in which routers poll, 1 or -1
        self.clock = Clock()
        self.routers = [self.started(*OLD) for _ in range(3)]
        self.active: list[ApiKey] = []
        self.revoked: list[ApiKey] = []

    def started(self, *file: bytes) -> RedisKeyWriter:
        return self.opened(*file, steady_s=self.clock)

    async def create(self, *file: bytes) -> None:
        self.active.append(new_key())
        await self.opened(*file).put(record(self.active[-1]))

    async def revoke(self, key: ApiKey, *file: bytes) -> None:
        """As the command does it, with a file."""
        command = self.opened(*file)
        await command.update()
        await command.put({**REVOKED, **command.fields_of(key.key_id)})
        self.active.remove(key)
        self.revoked.append(key)

    async def check(self) -> None:
        """Each router polls once, and knows all keys and revocations."""
        self.clock.now_s += POLL_S
        for router in self.routers[:: self.order]:
            await router.poll()
        for keys, wanted in ((self.active, "acme"), (self.revoked, WAS_REVOKED)):
            assert [answers(self.routers, key) for key in keys] == [{wanted}] * len(keys)

    async def use(self, *files: tuple[bytes, ...]) -> None:
        """Keys are created and revoked with these files: an old one, one of this state, and one across the two."""
        for file in files:
            await self.create(*file)
            await self.check()
            for key in (self.active[0], self.active[-1]):
                await self.revoke(key, *file)
                await self.check()
            await self.create(*files[-1])

    async def restart(self, before: tuple[bytes, ...], after: tuple[bytes, ...]) -> None:
        """One router after the other starts with the new file, and in between keys are used with both files."""
        for number in range(len(self.routers)):
            await self.use(before, after)
            self.routers[number] = self.started(*after)
            await self.use(before, after)


@pytest.mark.parametrize("order", one_in(2, [1, -1]))
async def test_in_every_state_of_a_planned_change_keys_count_and_a_revocation_counts_at_each_routers_next_poll(
    opened: Opened, client: Any, order: int
) -> None:
    assert POLL_S + ANSWER_TIMEOUT_S < 5  # so it counts within 5 s
    fleet = Fleet(opened, order)
    for _ in range(40):
        await fleet.create(*OLD)
    with capture_logs() as logs:
        await fleet.restart(OLD, ADDED)
        await fleet.restart(ADDED, SWAPPED)

        async def used_meanwhile() -> None:
            await fleet.use(SWAPPED)

        assert await opened(*SWAPPED).reseal(used_meanwhile) > 0
        await fleet.use(SWAPPED)
        assert await opened(*SWAPPED).reseal(used_meanwhile) == 0
        await fleet.restart(SWAPPED, NEW)
        fleet.routers = [fleet.started(*NEW)]  # it knows nothing but what Redis has
        await fleet.check()
    assert logs == [], "nothing was ignored, and no router wrote anything back"
    assert min(len(fleet.active), len(fleet.revoked)) > 20


async def test_a_router_verifies_with_all_secrets_whatever_their_order(opened: Opened) -> None:
    by_old, by_new = new_key(), new_key()
    await opened(*OLD).put(record(by_old))
    await opened(*NEW).put(record(by_new))
    for file in (ADDED, SWAPPED):
        router = opened(*file)
        await router.poll()
        assert answers([router], by_old) == answers([router], by_new) == {"acme"}


async def test_a_router_that_was_cut_off_while_keys_were_sealed_costs_no_key_and_shows_in_the_list(
    opened: Opened, client: Any
) -> None:
    """It still has the file of the first step, so for it the old secret comes first."""
    clock, key = Clock(), new_key()
    cut_off, router = opened(*ADDED, steady_s=clock), opened(*SWAPPED, steady_s=clock)
    await opened(*OLD).put(record(key))
    await polled(clock, cut_off, router)
    assert await opened(*SWAPPED).reseal(lambda: polled(clock, router)) == 1, "it is not noticed"
    clock.now_s += READ_ALL_S
    await cut_off.poll()
    listing = opened(*SWAPPED)
    await listing.update()
    assert (listing.sealed_before, listing.seal_of(key.key_id)) == ([key.key_id], 1)
    restarted = opened(*NEW)
    await polled(clock, router, restarted)
    assert answers([router, restarted], key) == {"acme"}


async def test_a_router_does_not_write_over_a_revocation_that_it_has_not_read(
    opened: Opened, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, router = new_key(), opened()
    await router.put(record(key))
    await router.poll()
    await client.delete(RECORDS, VERSION)  # so the router writes back what it knows
    ask = router._ask

    async def after_a_revocation(script: Any, *arguments: Any) -> Any:
        if script is router._write:
            monkeypatch.setattr(router, "_ask", ask)
            await opened().put(record(key) | REVOKED)
        return await ask(script, *arguments)

    monkeypatch.setattr(router, "_ask", after_a_revocation)
    with capture_logs() as logs:
        await router.poll()
        assert router._ask == ask, "it was about to write"
        await router.poll()
    started = opened()
    await started.poll()
    assert answers([router, started], key) == {WAS_REVOKED}
    assert logs == [], "it wrote nothing back"


async def test_a_router_that_was_left_with_the_old_file_costs_no_key_and_is_told_of(opened: Opened) -> None:
    clock, key, command = Clock(), new_key(), opened(*SWAPPED)
    late, router = opened(*OLD, steady_s=clock), opened(*SWAPPED, steady_s=clock)
    await late.put(record(key))
    await polled(clock, late, router)
    with pytest.raises(IdentityError, match="was not started with this file yet"):
        await command.reseal(lambda: polled(clock, late, router))
    for _ in range(2):
        await polled(clock, late, router)
        assert answers([late, router], key) == {"acme"}
    assert await opened(*SWAPPED).reseal(lambda: polled(clock, router)) == 1
    started = opened(*NEW)
    await started.poll()
    assert answers([started], key) == {"acme"}


async def test_a_record_with_the_old_seal_that_is_put_back_is_replaced(opened: Opened, client: Any) -> None:
    clock, keys = Clock(), [new_key() for _ in range(16)]  # the order of seals is no matter of luck
    router = opened(*SWAPPED, steady_s=clock)
    for key in keys:
        await opened(*OLD).put(record(key))
    old = await client.hgetall(RECORDS)
    await opened(*SWAPPED).reseal(at_once)
    new = await client.hgetall(RECORDS)
    assert all(old[name] != new[name] for name in old)
    await polled(clock, router)
    await client.hset(RECORDS, mapping=old)
    await polled(clock, router)
    assert await client.hgetall(RECORDS) == new


async def test_of_an_earlier_secret_nothing_counts_once_it_is_dropped(opened: Opened) -> None:
    key, router = new_key(), opened(*NEW)
    await opened(*OLD).put(record(key))
    with capture_logs() as logs:
        await router.poll()
    assert answers([router], key) == {NOT_VALID}
    assert [entry["problem"] for entry in logs] == ["it is not sealed with this fleet's secret"]


async def test_after_a_leak_keys_are_created_anew_and_nothing_that_was_forged_counts(
    opened: Opened, client: Any
) -> None:
    """The steps of the page: a file with the new secret alone, new keys, and a restart of all routers; no reseal."""
    clock, before, forged, renewed = Clock(), new_key(), new_key(), new_key()
    old = [opened(*OLD, steady_s=clock) for _ in range(2)]
    attacker = opened(*OLD)
    await opened(*OLD).put(record(before))
    await attacker.put(record(forged, roles=["operator"]))
    await attacker.put(record(before, acts_for=["*"]))
    await polled(clock, *old)
    assert answers(old, forged) == {"acme"}
    await opened(*NEW).put(record(renewed))
    await polled(clock, *old)
    fleet = [opened(*NEW, steady_s=clock) for _ in range(2)]
    for attack in (forged, before, renewed):
        await attacker.put(record(attack, acts_for=["*"], roles=["operator"]) | {"id": attack.key_id})
        await polled(clock, *fleet)
        assert answers(fleet, forged) == answers(fleet, before) == {NOT_VALID}
        assert answers(fleet, renewed) == {"acme"}
        (identity,) = {router.records[renewed.key_id].identity for router in fleet}
        assert not identity.acts_for
        assert identity.roles == {Role.USER}
    await client.delete(RECORDS, VERSION)  # what the old secret sealed goes, and routers write theirs
    await fleet[0].poll()
    assert [key.decode() for key in await client.hkeys(RECORDS)] == [renewed.key_id]


async def test_reseal_gives_forged_records_the_new_seal_too_so_it_is_for_planned_changes_alone(opened: Opened) -> None:
    forged, started = new_key(), opened(*NEW)
    await opened(*OLD).put(record(forged))
    assert await opened(*SWAPPED).reseal(at_once) == 1
    await started.poll()
    assert answers([started], forged) == {"acme"}


async def test_a_key_that_is_revoked_while_records_are_sealed_stays_revoked(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, command = new_key(), opened(*SWAPPED)
    await opened(*OLD).put(record(key))
    ask = command._ask

    async def after_a_revocation(script: Any, *arguments: Any) -> Any:
        if script is command._write:
            monkeypatch.setattr(command, "_ask", ask)
            await opened(*OLD).put(record(key) | REVOKED)
        return await ask(script, *arguments)

    monkeypatch.setattr(command, "_ask", after_a_revocation)
    assert await command.reseal(at_once) == 1
    started = opened(*NEW)
    await started.poll()
    assert answers([started], key) == {WAS_REVOKED}


async def test_records_that_change_all_the_time_are_given_up(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    command = opened(*SWAPPED)
    await opened(*OLD).put(record(new_key()))

    async def replaces_nothing(script: Any, *arguments: Any) -> Any:
        return 0 if script is command._write else await own(script, *arguments)

    own = command._ask
    monkeypatch.setattr(command, "_ask", replaces_nothing)
    with pytest.raises(StoreDown, match="change the records all the time"):
        await command.reseal(at_once)


async def test_more_keys_than_a_page_are_sealed(opened: Opened, client: Any) -> None:
    writer, count = opened(*OLD), 2 * PAGE_KEYS + 1
    for _ in range(count):
        await writer.put(record(new_key()))
    assert await opened(*SWAPPED).reseal(at_once) == count
    started = opened(*NEW)
    await started.poll()
    assert len(started.records) == count == await client.hlen(RECORDS)
