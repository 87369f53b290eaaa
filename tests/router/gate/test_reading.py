"""Messages are read a few at a time and taken at a pace, and no account keeps the others from having theirs."""

import asyncio
from collections import Counter
from contextlib import suppress
from functools import partial
from random import Random

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.router.virtual_time import in_virtual_time, virtual_time
from trunkline.status import RequestRefused
from trunkline_router.access.gate import reading as module
from trunkline_router.access.gate.places import Bounds, Sender
from trunkline_router.access.gate.reading import LONG_S, READ_BOUNDS, Reading
from trunkline_router.access.gate.turns import (
    ACCOUNT_BYTES_PER_S,
    AT_ONCE_S,
    LARGE_BYTES,
    MAX_AHEAD_S,
    TAKEN_BYTES_PER_S,
    MessageTurns,
    taken_in_turn,
)

BOUNDS = Bounds(in_all=7, of_host=5, of_connection=4, of_tenant=3)
ONE = Bounds(1, of_host=1, of_connection=1, of_tenant=1)
LARGEST = 8 << 20
BURST_BYTES = round(AT_ONCE_S * TAKEN_BYTES_PER_S)


def sender(name: str) -> Sender:
    """Of a host, connection and tenant: "host/connection/tenant", or of one with a host of its own."""
    host, connection, tenant = name.split("/") if "/" in name else (name, "", "")
    return Sender(host, f"{host}:{connection}", tenant)


class Readers:
    """Calls that hold their places until they are told, and what must be true of them all the time."""

    def __init__(self, bounds: Bounds = READ_BOUNDS) -> None:
        self.reading = Reading(bounds)
        self.bounds = bounds
        self.open: Counter[tuple[str, ...]] = Counter()
        self.tasks: list[tuple[str, asyncio.Task[str], asyncio.Event]] = []

    def check(self) -> None:
        bounds = self.bounds
        limits = {"host": bounds.of_host, "connection": bounds.of_connection, "tenant": bounds.of_tenant}
        assert self.open[()] == self.reading._places.num_held <= bounds.in_all
        assert all(count <= limits[path[0]] for path, count in self.open.items() if path)

    def begin(self, name: str) -> tuple[str, asyncio.Task[str], asyncio.Event]:
        come = asyncio.Event()
        reader = name, asyncio.create_task(self._read(name, come)), come
        self.tasks.append(reader)
        return reader

    async def _read(self, name: str, come: asyncio.Event) -> str:
        task = asyncio.current_task()
        assert task is not None
        who = sender(name)
        paths = [(), ("host", who.host), ("connection", who.connection), ("tenant", who.tenant)]
        place = await self.reading.begin(who, task.cancel)
        self.open.update(paths)
        try:
            await come.wait()
        finally:
            self.open.subtract(paths)
            self.reading.end(place)
        return name


async def settle(readers: Readers) -> None:
    """Until nothing more happens by itself."""
    unchanged, last = 0, None
    while unchanged < 5:
        await asyncio.sleep(0)
        now = (len(asyncio.all_tasks()), +readers.open)
        unchanged, last = (unchanged + 1, now) if now == last else (0, now)


async def refusals(begun: list[tuple[str, asyncio.Task[str], asyncio.Event]]) -> list[RequestRefused]:
    """What those calls were refused with that have ended."""
    refused = []
    for _, task, _ in begun:
        if task.done():
            with suppress(RequestRefused):
                try:
                    await task
                except RequestRefused as error:
                    refused.append(error)
                except asyncio.CancelledError as cancelled:
                    refused.append(cancelled.args[0])
    return refused


async def end(readers: Readers) -> None:
    for _, task, _ in readers.tasks:
        task.cancel()
    await asyncio.gather(*(task for _, task, _ in readers.tasks), return_exceptions=True)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_the_bounds_hold_and_no_place_is_lost_whoever_comes_ends_or_is_cancelled(
    seed: int, hosts: int, connections: int, tenants: int
) -> None:
    async def play() -> None:
        draw = Random(seed)
        readers = Readers(BOUNDS)
        for _ in range(80):
            action = draw.random()
            if action < 0.5 or not readers.tasks:
                readers.begin("/".join(str(draw.randrange(most)) for most in (hosts, connections, tenants)))
            else:
                _, task, come = readers.tasks.pop(draw.randrange(len(readers.tasks)))
                come.set() if action < 0.75 else task.cancel()
            if draw.random() < 0.5:  # else several things happen in one turn of the loop
                await settle(readers)
                readers.check()
                assert not any(map(readers.reading._places.fits, readers.reading._waiting))
        for _, _, come in readers.tasks:
            come.set()
        await asyncio.wait_for(asyncio.gather(*(task for _, task, _ in readers.tasks), return_exceptions=True), 60)
        assert readers.reading._places.num_held == 0
        assert not readers.reading._waiting
        assert not any(turn.locked() for turn in readers.reading._turns_of_senders.values())
        assert not readers.reading._since_s

    in_virtual_time(play())


@virtual_time
async def test_senders_that_wait_take_turns() -> None:
    readers = Readers(ONE)
    holding = readers.begin("first")
    await settle(readers)
    order = [readers.begin(name) for name in ("a/1/x", "a/1/x", "a/1/y", "b/1/x", "b/1/x", "c/1/x")]
    for _, _, come in order:
        come.set()
    await settle(readers)
    ended: list[str] = []
    for name, task, _ in order:
        task.add_done_callback(partial(lambda name, _: ended.append(name), name))
    holding[2].set()
    await asyncio.gather(*(task for _, task, _ in order))
    assert ended == ["a/1/x", "a/1/y", "b/1/x", "c/1/x", "a/1/x", "b/1/x"]


@pytest.mark.parametrize("waiting", ["other", "hog/2/x"])
@virtual_time
async def test_a_message_that_does_not_come_is_given_up_for_a_sender_with_fewer_where_all_places_are_taken(
    waiting: str,
) -> None:
    readers = Readers(Bounds(4, of_host=4, of_connection=4, of_tenant=4))
    stalled = [readers.begin("hog/1/x") for _ in range(4)]
    await settle(readers)
    other = readers.begin(waiting.replace("/x", "/y"))
    other[2].set()
    await settle(readers)
    assert not other[1].done(), "the messages may still come"
    await asyncio.wait_for(other[1], 2 * LONG_S)
    (refused,) = await refusals(stalled)
    assert (refused.reason, refused.retry_delay_ms > 0) == ("OVERLOADED", True)
    await end(readers)


@virtual_time
async def test_calls_that_wait_for_their_own_senders_end_no_uploads() -> None:
    """Sixty-four large ones of one tenant, each of which takes many times as long as may be where places are few."""
    readers = Readers()
    slow = readers.begin("other/1/slow")
    uploads = [readers.begin("host/1/acme") for _ in range(64)]
    for done in range(0, 64, 8):
        await asyncio.sleep(2 * LONG_S)
        for _, _, come in uploads[done : done + 8]:
            come.set()
    await asyncio.gather(*(task for _, task, _ in uploads))
    slow[2].set()
    await slow[1]


@pytest.mark.parametrize("connections", [1, 20])
@virtual_time
async def test_half_open_calls_of_a_host_do_not_keep_its_last_places(connections: int) -> None:
    readers = Readers()
    half_open = [readers.begin(f"host/{number % connections}/{number}") for number in range(400)]
    await settle(readers)
    for _ in range(3):
        for name in ("host/innocent/acme", "elsewhere"):
            innocent = readers.begin(name)
            innocent[2].set()
            await settle(readers)
            assert innocent[1].done(), "without having waited"
    assert not await refusals(half_open)
    await end(readers)


@virtual_time
async def test_half_open_calls_of_as_many_connections_as_there_are_places_delay_their_own_host_for_seconds() -> None:
    readers = Readers()
    for number in range(400):
        readers.begin(f"host/{number % 200}/{number}")
    await settle(readers)
    for _ in range(3):
        innocent, elsewhere = readers.begin("host/innocent/acme"), readers.begin("elsewhere")
        innocent[2].set()
        elsewhere[2].set()
        await settle(readers)
        assert elsewhere[1].done(), "without having waited"
        await asyncio.wait_for(innocent[1], 4 * LONG_S)
    await end(readers)


@virtual_time
async def test_a_message_that_never_comes_is_given_up_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MESSAGE_TIMEOUT_S", 3.0)
    readers = Readers(ONE)
    slow = readers.begin("slow")
    await settle(readers)
    waiting = readers.begin("slow")
    await asyncio.sleep(3.5)
    (refused,) = await refusals([slow, waiting])
    assert "did not arrive within" in refused.message
    assert refused.reason == "INVALID_REQUEST"
    readers.reading.arrived(next(iter(readers.reading._since_s)))
    third = readers.begin("third")
    await asyncio.sleep(3.5)
    (late,) = await refusals([third])
    assert late.reason == "OVERLOADED"
    assert not waiting[1].done(), "its message has arrived"
    await end(readers)


class Calls:
    """Calls whose messages arrive when they are told, and what was taken in each turn of the loop."""

    def __init__(self) -> None:
        self.turns = MessageTurns()
        self.in_turn: list[int] = [0]
        self.taken: list[str] = []

    async def call(self, account: str, arrival: "asyncio.Future[int]") -> int:
        async def reading() -> int:
            return await arrival

        num_bytes = await taken_in_turn(reading(), lambda: self.turns.turn(account))
        self.in_turn[-1] += num_bytes
        self.taken.append(account)
        self.turns.took(account, num_bytes)
        return num_bytes

    async def watch_turns(self, over: asyncio.Event) -> None:
        while not over.is_set():
            await asyncio.sleep(0.001)
            self.in_turn.append(0)


async def arrived(num_bytes: int) -> int:
    await asyncio.sleep(0)
    return num_bytes


@pytest.mark.parametrize("seed", range(8))
@virtual_time
async def test_what_arrives_together_is_taken_in_bounded_portions_and_nothing_is_left(seed: int) -> None:
    draw, calls, over = Random(seed), Calls(), asyncio.Event()
    watching = asyncio.create_task(calls.watch_turns(over))
    loop = asyncio.get_running_loop()
    arrivals: list[asyncio.Future[int]] = [loop.create_future() for _ in range(60)]
    tasks = [asyncio.create_task(calls.call(str(draw.randrange(20)), arrival)) for arrival in arrivals]
    await asyncio.sleep(0)
    sizes = [draw.choice([100, 10_000, LARGE_BYTES + 1, BURST_BYTES, 4 << 20, LARGEST]) for _ in arrivals]
    for arrival, size in zip(arrivals, sizes, strict=True):
        if draw.random() < 0.9:
            arrival.set_result(size)
    for task in draw.sample(tasks, 10):
        task.cancel()
        if draw.random() < 0.5:
            await asyncio.sleep(0)
    for arrival in arrivals:
        if not arrival.done():
            arrival.set_result(1)
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
    over.set()
    await watching
    others = [result for result in results if not isinstance(result, int)]
    assert [type(other) for other in others] == [asyncio.CancelledError] * len(others)
    assert len(others) <= 10
    assert len(calls.taken) >= 50
    assert max(calls.in_turn) < 2 * BURST_BYTES + LARGEST
    assert not any(turn.locked() for turn in (calls.turns._turn, *calls.turns._turns_of_accounts.values()))


async def test_small_messages_go_on_at_once() -> None:
    calls = Calls()
    arrivals: list[asyncio.Future[int]] = [asyncio.get_running_loop().create_future() for _ in range(100)]
    tasks = [asyncio.create_task(calls.call("one", arrival)) for arrival in arrivals]
    await asyncio.sleep(0)
    for arrival in arrivals:
        arrival.set_result(1000)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(calls.taken) == len(arrivals)
    await asyncio.gather(*tasks)


@virtual_time
async def test_an_account_ahead_of_its_pace_waits_and_others_do_not() -> None:
    calls, loop = Calls(), asyncio.get_running_loop()

    async def take(account: str, num_bytes: int) -> None:
        await calls.call(account, asyncio.ensure_future(arrived(num_bytes)))

    begun_s = loop.time()
    for _ in range(8):
        await take("hog", LARGEST)
    assert loop.time() - begun_s == pytest.approx(7 * LARGEST / ACCOUNT_BYTES_PER_S - MAX_AHEAD_S)
    calls.turns.took("hog", 10 * LARGEST)
    await asyncio.sleep(1.0)  # the loop is free, and the account is ahead
    waiting = [asyncio.create_task(take("hog", 10)) for _ in range(3)]
    for _ in range(5):
        await take("other", 10)
    assert not any(task.done() for task in waiting)
    await asyncio.wait_for(asyncio.gather(*waiting), 60)
    assert LARGEST / ACCOUNT_BYTES_PER_S > MAX_AHEAD_S, "two of the largest messages are not read at once"


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_message_that_waits_is_taken_by_a_real_loop(run: object) -> None:
    async def scene() -> None:
        turns = MessageTurns()
        turns.took("flood", 3600 * ACCOUNT_BYTES_PER_S)
        turns._free_s = 0.0
        waiting = asyncio.create_task(turns.turn("flood"))
        await asyncio.sleep(0)
        turns.took("other", LARGEST)
        async with asyncio.timeout(20):
            await turns.turn("other")
        assert not waiting.done()
        waiting.cancel()

    assert callable(run)
    run(scene())
