"""What a search for a worker promises: how soon a request has one, or is refused, and what it costs."""

import asyncio
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from tests.router.virtual_time import in_virtual_time
from trunkline.capabilities import GRAMMARS, NO_NEEDS, Needs
from trunkline.v1.worker_pb2 import GetModelResponse
from trunkline_router.routing.prefix_index import WorkerBlocks
from trunkline_router.workers.connected_worker import ConnectedWorker
from trunkline_router.workers.link_context import LinkContext
from trunkline_router.workers.pool import Pools
from trunkline_router.workers.pool_search import (
    ANSWERED_AT_MOST_S,
    APART_S,
    LOOK_AT_MOST_S,
    MOST_LOOKING,
    PATIENCE_SHARE,
    SILENT_AT_MOST_S,
    STEP_S,
    ConnectAttempts,
    PoolSearch,
)
from trunkline_router.workers.session import WorkerSession
from trunkline_router.workers.worker_link import UNARY_TIMEOUT_S, WorkerLink

LONG_S = 3600.0
CONNECT_S = 0.02  # from a worker's answer to being of use
AT_ONCE_S = 3 * STEP_S
approx: Callable[..., object] = pytest.approx  # which may stand in a tuple beside floats


def now_s() -> float:
    return asyncio.get_running_loop().time()


class Fleet:
    """Addresses and a search for workers there, in virtual time. `pause_s` is every link's."""

    def __init__(self, pause_s: float = LONG_S) -> None:
        self.pools = Pools(Random(0))
        self.asked = 0  # whether there are workers
        self.search = self.pools.search = PoolSearch(self.pools.missing, self._has, now_s)
        self.pause_s = pause_s
        self.tries_s: list[float] = []  # when they began
        self._running: list[asyncio.Task[None]] = []

    def _has(self, name: str, needs: Needs) -> bool:
        self.asked += 1
        return self.pools._has(name, needs)

    def add(
        self,
        *,
        model: str = "",
        was: str = "",
        is_silent: bool = False,
        hangs: bool = False,
        capabilities: Needs = NO_NEEDS,
    ) -> "Address":
        """model: what is served there; was: what was before; hangs: once it has said so."""
        address = Address(self, len(self.pools.links), model, is_silent, hangs)
        address.capabilities = capabilities
        if was:
            address.link.model = GetModelResponse(model=was)
        self.pools.links.append(address.link)
        self._running.append(asyncio.create_task(address.run()))
        return address

    def lookup(self, look_up: Callable[[], Any], pause_s: float = LONG_S) -> None:
        """A name."""
        tries = ConnectAttempts(now_s)
        self.pools.lookups.append(tries)

        async def run() -> None:
            while True:
                await look_up()
                await tries.pause(pause_s)

        self._running.append(asyncio.create_task(run()))

    async def looked(self, name: str = "m", *, at_s: float = 0.0, **terms: Any) -> tuple[bool, float]:
        """Whether a worker is found, and after what time."""
        await asyncio.sleep(at_s)
        begun_s = now_s()
        await self.search.look_for(name, terms.pop("tenant", ""), **terms)
        return self.pools._has(name, terms.get("needs", NO_NEEDS)), now_s() - begun_s


class Address:
    """What WorkerLink.run() does there."""

    def __init__(self, fleet: Fleet, number: int, model: str, is_silent: bool, hangs: bool) -> None:
        self.fleet, self.model, self.is_silent, self.hangs = fleet, model, is_silent, hangs
        self.capabilities = NO_NEEDS
        self.tries_s: list[float] = []
        no_tokenizers: Any = None
        context = LinkContext("r", no_tokenizers, fleet.pools.index, fleet.pools.notify, Random(0))
        self.link = WorkerLink(f"a{number}:1", context)
        self.link.connect_attempts = ConnectAttempts(now_s)

    async def run(self) -> None:
        tries, fleet = self.link.connect_attempts, self.fleet
        while self.link.wanted:
            self.tries_s.append(now_s())
            fleet.tries_s.append(now_s())
            if self.is_silent:
                await asyncio.sleep(UNARY_TIMEOUT_S)
            elif self.model:
                tries.found(self.model)
                await asyncio.sleep(LONG_S if self.hangs else CONNECT_S)
                model = GetModelResponse(
                    model=self.model, worker_id=self.link.address, block_size=16, capabilities=self.capabilities
                )
                tokenizer: Any = SimpleNamespace(encoding=b"")
                self.link.worker = ConnectedWorker(
                    model, WorkerBlocks(fleet.pools.index), tokenizer, WorkerSession(), self.link.breaker, ""
                )
                fleet.pools.notify()
                await asyncio.sleep(LONG_S)
            await tries.pause(fleet.pause_s)


def test_a_look_ends_the_pause_and_finds_what_has_come() -> None:
    async def scenario() -> None:
        fleet = Fleet()
        worker = fleet.add(was="m")
        await asyncio.sleep(1.0)
        assert await fleet.looked() == (False, approx(0, abs=AT_ONCE_S))
        assert len(worker.tries_s) == 2
        worker.model = "m"
        assert await fleet.looked() == (True, approx(APART_S, abs=CONNECT_S + AT_ONCE_S))
        assert len(worker.tries_s) == 3
        assert await fleet.looked() == (True, 0.0)

    in_virtual_time(scenario())


def test_a_search_for_capabilities_passes_over_workers_without_them() -> None:
    async def scenario() -> None:
        fleet = Fleet()
        fleet.add(model="m")
        able = fleet.add(was="m", capabilities=GRAMMARS)
        await asyncio.sleep(1.0)
        assert await fleet.looked(needs=GRAMMARS) == (False, approx(0, abs=AT_ONCE_S))
        able.model = "m"
        plain, special = await asyncio.gather(fleet.looked(), fleet.looked(needs=GRAMMARS))
        assert plain == (True, 0.0)
        assert special == (True, approx(APART_S, abs=CONNECT_S + AT_ONCE_S))
        assert await fleet.looked(needs=GRAMMARS) == (True, 0.0)

    in_virtual_time(scenario())


def test_a_try_that_began_before_is_not_the_last_word() -> None:
    async def scenario() -> None:
        fleet = Fleet()
        worker = fleet.add(was="m", is_silent=True)
        await asyncio.sleep(UNARY_TIMEOUT_S - 0.3)
        early = asyncio.create_task(fleet.looked())
        await asyncio.sleep(0.0)
        worker.is_silent, worker.model = False, "m"  # the try under way will not see it
        assert await early == (False, approx(0, abs=AT_ONCE_S)), "no search waits for what has long been silent"
        found, after_s = await fleet.looked(at_s=0.3 + AT_ONCE_S)
        assert found
        assert after_s <= CONNECT_S + AT_ONCE_S

    in_virtual_time(scenario())


@pytest.mark.parametrize("silent", [0, 1, 20])
def test_addresses_that_are_silent_hold_up_neither_the_tries_of_others_nor_their_refusals(silent: int) -> None:
    async def scenario() -> None:
        fleet = Fleet(pause_s=2.0)
        worker = fleet.add(was="m")
        for _ in range(silent):
            fleet.add(was="other", is_silent=True)
        await asyncio.sleep(UNARY_TIMEOUT_S - 3.0)

        async def come_back() -> None:
            await asyncio.sleep(0.12)
            worker.model = "m"

        looks = [fleet.looked(at_s=at_s) for at_s in (0.0, 0.15, 0.3, 0.5)]
        ((first, after_s), *others), _ = await asyncio.gather(asyncio.gather(*looks), come_back())
        assert not first
        assert after_s <= AT_ONCE_S
        for found, found_after_s in others:
            assert found
            assert found_after_s <= APART_S + CONNECT_S + AT_ONCE_S

    in_virtual_time(scenario())


def test_a_lookup_that_hangs_holds_up_no_address() -> None:
    async def scenario() -> None:
        fleet = Fleet()
        worker = fleet.add(was="m")
        fleet.lookup(lambda: asyncio.sleep(LONG_S))
        await asyncio.sleep(SILENT_AT_MOST_S / 2)
        worker.model = "m"
        assert await fleet.looked() == (True, approx(0, abs=CONNECT_S + AT_ONCE_S))

    in_virtual_time(scenario())


def test_what_a_lookup_finds_is_waited_for_in_the_same_look() -> None:
    async def scenario() -> None:
        fleet = Fleet()
        has_come = False

        async def look_up() -> None:
            await asyncio.sleep(0.1)
            if has_come and not fleet.pools.links:
                fleet.add(model="m")

        fleet.lookup(look_up)
        await asyncio.sleep(1.0)
        assert await fleet.looked() == (False, approx(0.1, abs=AT_ONCE_S))
        has_come = True
        assert (await fleet.looked(at_s=APART_S))[0]

    in_virtual_time(scenario())


def test_a_link_that_has_ended_is_waited_for_by_nobody() -> None:
    async def scenario() -> None:
        fleet = Fleet(pause_s=2.0)
        gone, there = fleet.add(was="m"), fleet.add(was="m")
        await asyncio.sleep(1.0)
        gone.is_silent = True
        first = asyncio.create_task(fleet.looked())
        await asyncio.sleep(AT_ONCE_S)
        gone.link.wanted = False  # no source names it any more: this was its last attempt
        assert (await first)[1] <= APART_S
        tries = len(there.tries_s)
        for _ in range(5):
            assert (await fleet.looked())[1] <= APART_S + AT_ONCE_S
        assert len(there.tries_s) == tries + 5

    in_virtual_time(scenario())


@pytest.mark.parametrize(("answers_as", "time_left_s", "most_s"), [
    ("", None, LOOK_AT_MOST_S), ("", 0.2, PATIENCE_SHARE * 0.2), ("m", 3.0, PATIENCE_SHARE * 3.0),
    ("m", None, ANSWERED_AT_MOST_S), ("other", None, 0.0),
])  # fmt: skip
def test_a_try_that_does_not_end_leaves_a_request_the_time_to_hear_of_it(
    answers_as: str, time_left_s: float | None, most_s: float
) -> None:
    async def scenario() -> None:
        fleet = Fleet()
        fleet.add(was="m")
        address = fleet.add(was=answers_as)
        await asyncio.sleep(1.0)
        address.is_silent, address.model, address.hangs = not answers_as, answers_as, True
        found, after_s = await fleet.looked(time_left_s=time_left_s)
        assert not found
        assert after_s == pytest.approx(most_s, abs=AT_ONCE_S)
        later = await asyncio.gather(*(fleet.looked(at_s=ANSWERED_AT_MOST_S + at_s) for at_s in (0.0, 1.0)))
        for _, later_after_s in later:
            assert later_after_s <= AT_ONCE_S, "what got no further for so long is not there"

    in_virtual_time(scenario())


@pytest.mark.parametrize("name", ["m", "unknown"])
def test_whoever_asks_for_whatever_tries_are_spread_and_bounded(name: str) -> None:
    async def scenario() -> None:
        fleet = Fleet()
        addresses = [fleet.add(was="m") for _ in range(200)]
        await asyncio.sleep(10.0)
        fleet.tries_s.clear()
        begun_s, lasts_s = now_s(), 5.0
        while now_s() < begun_s + lasts_s:
            _, after_s = await fleet.looked(name)
            assert after_s <= LOOK_AT_MOST_S + AT_ONCE_S
        apart = [later - earlier for earlier, later in zip(fleet.tries_s, fleet.tries_s[1:], strict=False)]
        assert min(apart) >= STEP_S * 0.99
        for address in addresses[:3]:
            between = zip(address.tries_s, address.tries_s[1:], strict=False)
            assert all(later - earlier >= APART_S * 0.99 for earlier, later in between)

    in_virtual_time(scenario())


@pytest.mark.parametrize("name", ["m", "unknown"])
def test_one_address_is_not_tried_more_often_however_many_ask(name: str) -> None:
    async def scenario() -> None:
        fleet = Fleet()
        address = fleet.add(was="m")
        await asyncio.sleep(1.0)
        address.tries_s.clear()
        for _ in range(4):
            looked = await asyncio.gather(*(fleet.looked(name, tenant=str(number % 7)) for number in range(100)))
            assert not any(found for found, _ in looked)
        assert len(address.tries_s) == 4
        assert address.tries_s[-1] - address.tries_s[0] >= 3 * APART_S * 0.99

    in_virtual_time(scenario())


@pytest.mark.parametrize("dead", [0, 100])
def test_a_worker_that_is_back_is_found_in_time_whatever_other_addresses_do(dead: int) -> None:
    async def scenario() -> None:
        fleet = Fleet()
        for number in range(dead):
            fleet.add(was="m", is_silent=number % 3 == 0)
        worker = fleet.add(was="m")
        await asyncio.sleep(UNARY_TIMEOUT_S + 1.0)
        await fleet.looked()
        worker.model = "m"
        found, after_s = await fleet.looked()
        assert found
        assert after_s <= APART_S + (dead + 2) * STEP_S + CONNECT_S

    in_virtual_time(scenario())


def test_a_worker_that_came_back_with_another_model_is_found_by_its_new_name() -> None:
    async def scenario() -> None:
        fleet = Fleet()
        worker = fleet.add(was="m1")
        await asyncio.sleep(1.0)
        worker.model = "m2"
        assert (await fleet.looked("m2"))[0]

    in_virtual_time(scenario())


def test_one_tenant_leaves_places_to_others_and_all_together_are_bounded() -> None:
    async def scenario() -> None:
        fleet = Fleet()
        address = fleet.add(was="m", is_silent=True)
        await asyncio.sleep(0.0)
        crowd = [asyncio.create_task(fleet.looked(tenant="loud")) for _ in range(MOST_LOOKING)]
        others = [asyncio.create_task(fleet.looked(tenant="quiet")) for _ in range(10)]
        await asyncio.sleep(AT_ONCE_S)
        assert not any(look.done() for look in others)
        assert sum(not look.done() for look in crowd) == MOST_LOOKING // 2
        many = [asyncio.create_task(fleet.looked(tenant=str(number))) for number in range(2 * MOST_LOOKING)]
        await asyncio.sleep(AT_ONCE_S)
        assert sum(not look.done() for look in crowd + others + many) == MOST_LOOKING
        address.model = "m"
        for look in crowd + others + many:
            assert not (await look)[0]
        assert not fleet.search._looking

    in_virtual_time(scenario())


def test_a_change_costs_the_same_however_many_look() -> None:
    async def scenario() -> None:
        fleet = Fleet()
        fleet.add(was="m", is_silent=True)
        await asyncio.sleep(0.0)
        looks = [asyncio.create_task(fleet.looked(tenant=str(number))) for number in range(MOST_LOOKING)]
        await asyncio.sleep(2 * STEP_S)
        fleet.asked = 0
        for _ in range(100):
            fleet.pools.notify()
            await asyncio.sleep(0.0)
        assert fleet.asked <= 2
        await asyncio.gather(*looks)

    in_virtual_time(scenario())


def test_one_who_stops_looking_leaves_the_look_to_the_others_and_then_nothing_runs() -> None:
    async def scenario() -> None:
        fleet = Fleet()
        address = fleet.add(was="m")
        await asyncio.sleep(1.0)
        address.model = "m"
        first, second = (asyncio.create_task(fleet.looked()) for _ in range(2))
        await asyncio.sleep(0.0)
        first.cancel()
        assert (await second)[0]
        await asyncio.sleep(2 * STEP_S)
        assert fleet.search._steps is not None
        assert fleet.search._steps.done()

    in_virtual_time(scenario())
