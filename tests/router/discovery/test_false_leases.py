"""Leases that lead nowhere: they cost a router little, and keep no worker from being found."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager

from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from tests.router.cluster import until
from tests.router.fake_worker import FakeWorker
from tests.router.liar import Liar
from tests.router.membership import connected, membership
from trunkline.v1.worker_pb2 import GetModelResponse
from trunkline_router.prompts.helper_pool import Helpers
from trunkline_router.workers.discovery import (
    ASIDE_FIRST_S,
    ASIDE_MOST_S,
    MOST_SHOWN_ASIDE,
    MOST_TRIED,
    Addresses,
    LeaseQueue,
)
from trunkline_router.workers.link_context import LinkSecurity

FALSE_LEASES = 3_000


class Leases:
    """What is leased, as a test says."""

    def __init__(self, leased: Addresses) -> None:
        self._leased = leased
        self._changed = asyncio.Event()
        self._changed.set()

    def say(self, leased: Addresses) -> None:
        self._leased = leased
        self._changed.set()

    async def watch(self) -> AsyncIterator[Addresses]:
        while True:
            await self._changed.wait()
            self._changed.clear()
            yield self._leased


def refusing(count: int) -> Addresses:
    """Addresses where nobody listens: ports below those that are given out."""
    return frozenset(f"127.{1 + number // 250}.0.1:{1 + number % 250}" for number in range(count))


@contextmanager
def silent(count: int) -> Iterator[Addresses]:
    """Servers to which connections can be made, and which never say a word."""
    with ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        yield frozenset(f"127.0.0.1:{server.getsockname()[1]}" for server in servers)


async def test_a_real_worker_is_found_among_false_leases_and_few_are_tried_at_once(helpers: Helpers) -> None:
    worker, late = await FakeWorker("a").start(), await FakeWorker("b").start()
    leases = Leases(refusing(FALSE_LEASES) | {worker.address})
    most_links = 0
    with capture_logs() as lines:
        async with membership(helpers, leases=leases.watch()) as pools:

            def look() -> bool:
                nonlocal most_links
                most_links = max(most_links, len(pools.links))
                return worker.address in connected(pools)

            await until(look)
            leases.say(refusing(200) | {worker.address, late.address})
            await until(lambda: look() and late.address in connected(pools))
            assert most_links <= MOST_TRIED + 2
            leases.say(frozenset({worker.address, late.address}))
            await until(lambda: connected(pools) == {worker.address, late.address} and len(pools.links) == 2)
            assert all(link.wanted for link in pools.links)
    said = [line for line in lines if line["event"] == "leased workers cannot be connected"]
    assert 0 < len(said) <= 14, "once, and again whenever they are twice as many"
    assert not [line for line in lines if line["event"] == "worker not connected"]
    for one in (worker, late):
        await one.die()


async def test_a_worker_is_found_behind_more_silent_servers_than_are_tried_at_once(helpers: Helpers) -> None:
    worker = await FakeWorker("a").start()
    with silent(MOST_TRIED + 10) as addresses:
        leases = Leases(addresses)
        async with membership(helpers, leases=leases.watch()) as pools:
            await until(lambda: len(pools.links) == MOST_TRIED)
            leases.say(addresses | {worker.address})
            await until(lambda: connected(pools) == {worker.address})
    await worker.die()


async def test_a_leased_worker_that_lies_of_itself_is_set_aside_and_tried_less_and_less(helpers: Helpers) -> None:
    liar = Liar("a", said=GetModelResponse(model="tiny"))
    liar.may_speak.set()
    await liar.start()
    with capture_logs() as lines:
        async with membership(helpers, leases=Leases(frozenset({liar.address})).watch()) as pools:
            await until(lambda: any(line["event"] == "leased workers cannot be connected" for line in lines))
            await until(lambda: not pools.links)
            assert not connected(pools)
    await liar.die()


ELSEWHERE = "192.0.2.1:50061"  # an address of documentation, which a router does not connect in plaintext


async def test_why_a_leased_worker_is_not_connected_is_known_while_the_lease_lasts(helpers: Helpers) -> None:
    worker = await FakeWorker("a").start()
    await worker.die()
    leases = Leases(frozenset({ELSEWHERE, worker.address}))
    async with membership(helpers, leases=leases.watch()) as pools:
        await until(lambda: pools.set_aside.keys() == {ELSEWHERE, worker.address})
        assert pools.set_aside[ELSEWHERE] == LinkSecurity().problem(ELSEWHERE)
        await worker.start()
        await until(lambda: connected(pools) == {worker.address})
        assert pools.set_aside.keys() - connected(pools) == {ELSEWHERE}
        leases.say(frozenset({worker.address}))
        await until(lambda: not pools.set_aside.keys() - connected(pools))
    await worker.die()


async def test_of_many_false_leases_the_problems_of_a_few_are_kept(helpers: Helpers) -> None:
    false = refusing(2 * MOST_SHOWN_ASIDE)
    async with membership(helpers, leases=Leases(false).watch()) as pools:
        seen = set[str]()
        await until(lambda: seen.update(pools.set_aside) or seen == false)  # type: ignore[func-returns-value]
        assert len(pools.set_aside) == MOST_SHOWN_ASIDE


async def test_a_leased_address_that_is_named_while_it_is_tried_is_tried_for_ever(helpers: Helpers) -> None:
    worker, names = FakeWorker("a"), Leases(frozenset())
    await worker.start()
    await worker.die()
    leases = Leases(frozenset({worker.address}))
    async with membership(helpers, names.watch(), leases=leases.watch()) as pools:
        names.say(frozenset({worker.address}))
        await until(lambda: [link.is_named for link in pools.links] == [True])
        leases.say(frozenset())
        await worker.start()
        await until(lambda: connected(pools) == {worker.address})
    await worker.die()


async def test_a_leased_worker_that_dies_is_connected_again(helpers: Helpers) -> None:
    worker = await FakeWorker("a").start()
    async with membership(helpers, leases=Leases(frozenset({worker.address})).watch()) as pools:
        for _ in range(2):
            await until(lambda: connected(pools) == {worker.address})
            await worker.die()
            await until(lambda: not connected(pools))
            await worker.start()
        await until(lambda: connected(pools) == {worker.address})
    await worker.die()


async def test_a_worker_that_is_leased_by_two_names_is_reached_by_the_other_where_one_breaks(
    helpers: Helpers,
) -> None:
    worker = await FakeWorker("a").start()
    names = frozenset({worker.address, f"localhost:{worker.port}"})
    leases = Leases(names)
    async with membership(helpers, leases=leases.watch()) as pools:
        await until(lambda: len(connected(pools)) == 1 and len(pools.links) == 1)
        other = names - connected(pools)
        leases.say(other)
        await worker.die()
        await worker.start()
        await until(lambda: connected(pools) == other)
    await worker.die()


addresses = st.sampled_from([f"h:{port}" for port in range(1, 9)])


@given(
    turns=st.lists(
        st.tuples(st.frozensets(addresses), st.sampled_from(["fails", "serves", "is another's"]), st.floats(0, 70)),
        max_size=40,
    )
)
def test_what_is_leased_is_tried_in_its_turn_and_never_twice_at_once(
    turns: list[tuple[frozenset[str], str, float]],
) -> None:
    queue, now_s, linked = LeaseQueue(), 0.0, set[str]()
    for leased, what, passes_s in turns:
        queue.lease(leased, now_s)
        now_s += passes_s
        address = queue.next(now_s, linked)
        if address is None:
            continue
        assert address in leased - linked
        if what == "serves":
            linked.add(address)
            queue.served(address)
        else:
            queue.failed(address, now_s, "h:1" if what == "is another's" else "")
        if what == "fails" and linked:
            queue.lost(linked.pop())
    everything = {f"h:{port}" for port in range(1, 9)}
    queue.lease(everything, now_s)
    while (address := queue.next(now_s + ASIDE_MOST_S, linked)) is not None:
        assert address not in linked
        linked.add(address)
    assert linked == everything, "everything has its turn"


def test_pauses_grow_up_to_a_minute_and_a_worker_that_served_is_tried_first() -> None:
    queue, now_s = LeaseQueue(), 0.0
    queue.lease({"false:1"}, now_s)
    assert queue.next(now_s, ()) == "false:1"
    for pause_s in [min(ASIDE_FIRST_S * 2**number, ASIDE_MOST_S) for number in range(10)]:
        queue.failed("false:1", now_s)
        queue.lease({"false:1"}, now_s)
        assert queue.next(now_s + pause_s * 0.99, ()) is None
        now_s += pause_s
        assert queue.next(now_s, ()) == "false:1"
    queue.lease({*(f"false:{port}" for port in range(2, 50)), "real:1"}, now_s)
    queue.served("real:1")
    assert queue.next(now_s, ()) == "real:1"


def test_addresses_that_come_all_the_time_overtake_none_and_ended_leases_are_forgotten() -> None:
    queue, now_s, tried = LeaseQueue(), 0.0, list[str]()
    ahead = {f"false:{number}" for number in range(100)}
    queue.lease({*ahead, "real:1"}, now_s)
    for turn in range(1000):
        address = queue.next(now_s, ())
        if address is not None:
            tried.append(address)
            queue.failed(address, now_s)
        now_s += 0.01
        leased = {*ahead, "real:1", *(f"later:{number}" for number in range(turn, turn + 5))}
        queue.lease(leased, now_s)
        assert queue._leases.keys() == leased, "nothing else is remembered"
    assert tried.index("real:1") <= len(ahead)
