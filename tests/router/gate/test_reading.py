"""Messages are read a few at a time, and no account keeps the others from having theirs read."""

import asyncio
from collections import Counter
from functools import partial
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.router.virtual_time import virtual_time
from trunkline.status import RequestRefused
from trunkline_router.access.gate import reading as module
from trunkline_router.access.gate.reading import ReadBounds, Reading
from trunkline_router.access.gate.rotation import Path
from trunkline_router.access.gate.sender import Sender

BOUNDS = ReadBounds(in_all=7, of_host=5, of_connection=4, of_sender=2, last=2)
LONG_S = 3600.0


def sender(name: str) -> Sender:
    """Of a host, connection and tenant: "host/connection/tenant", or of one with a host of its own."""
    host, connection, tenant = name.split("/") if "/" in name else (name, "", "")
    return Sender(host, f"{host}:{connection}", tenant)


class Readers:
    """Calls that hold their places until they are told, and what must be true of them all the time."""

    def __init__(self, reading: Reading, bounds: ReadBounds = BOUNDS) -> None:
        self.reading = reading
        self.bounds = bounds
        self.open: Counter[Path] = Counter()
        self.tasks: list[tuple[str, asyncio.Task[str], asyncio.Event]] = []

    @property
    def num_open(self) -> int:
        return sum(count for path, count in self.open.items() if len(path) == 1)

    def begin(self, name: str) -> tuple[str, asyncio.Task[str], asyncio.Event]:
        come = asyncio.Event()
        reader = name, asyncio.create_task(self._read(name, come)), come
        self.tasks.append(reader)
        return reader

    async def _read(self, name: str, come: asyncio.Event) -> str:
        paths = sender(name).paths
        async with self.reading.place(sender(name)):
            self.open.update(paths)
            try:
                assert self.num_open <= self.bounds.in_all
                assert all(self.open[path] <= self.bounds.of(path) for path in paths)
                await come.wait()
            finally:
                self.open.subtract(paths)
        return name


async def settle(readers: Readers) -> None:
    """Until nothing more happens by itself."""
    unchanged, last = 0, None
    while unchanged < 5:
        await asyncio.sleep(0)
        now = (len(asyncio.all_tasks()), +readers.open)
        unchanged, last = (unchanged + 1, now) if now == last else (0, now)


def most_possible(present: Counter[str]) -> int:
    """How many of these may be read at once."""
    levels = [Counter({tuple(sender(name)): count for name, count in present.items()})]
    for length in (3, 2, 1):
        bounded: Counter[Path] = Counter()
        for path, count in levels[-1].items():
            bounded[path[: length - 1]] += min(count, BOUNDS.of(path))
        levels.append(bounded)
    return min(BOUNDS.in_all, levels[-1][()])


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_places_are_all_used_and_none_is_lost_whoever_comes_ends_or_is_cancelled(
    seed: int, hosts: int, connections: int, tenants: int
) -> None:
    async def play() -> None:
        draw = Random(seed)
        readers = Readers(Reading(BOUNDS, long_s=LONG_S, hurry_s=LONG_S))
        for _ in range(80):
            action = draw.random()
            if action < 0.5 or not readers.tasks:
                readers.begin("/".join(str(draw.randrange(most)) for most in (hosts, connections, tenants)))
            else:
                _, task, come = readers.tasks.pop(draw.randrange(len(readers.tasks)))
                come.set() if action < 0.75 else task.cancel()
            if draw.random() < 0.5:  # else several things happen in one turn of the loop
                await settle(readers)
                present = Counter(name for name, task, _ in readers.tasks if not task.done())
                assert readers.num_open == most_possible(present)
        for _, _, come in readers.tasks:
            come.set()
        await asyncio.wait_for(asyncio.gather(*(task for _, task, _ in readers.tasks)), 60)
        assert not readers.reading._waiting
        assert not readers.reading._taken
        assert not readers.reading._readers
        assert readers.reading._free == BOUNDS.in_all

    asyncio.run(play())


ONE = ReadBounds(1, 1, 1, 1, last=0)


async def test_senders_that_wait_take_turns_by_host_then_by_tenant() -> None:
    readers = Readers(Reading(ONE, long_s=LONG_S, hurry_s=LONG_S), ONE)
    holding = readers.begin("first")
    await settle(readers)
    order = [readers.begin(name) for name in ("a/1/x", "a/1/x", "a/1/y", "a/1/z", "b/1/x", "b/1/x", "c/1/x")]
    for _, _, come in order:
        come.set()
    await settle(readers)
    ended: list[str] = []
    for name, task, _ in order:
        task.add_done_callback(partial(lambda name, _: ended.append(name), name))
    holding[2].set()
    await asyncio.gather(*(task for _, task, _ in order))
    assert ended == ["a/1/x", "b/1/x", "c/1/x", "a/1/y", "b/1/x", "a/1/z", "a/1/x"]


async def refusals(readers: Readers, begun: list[tuple[str, asyncio.Task[str], asyncio.Event]]) -> list[str]:
    """Of whom calls were refused, each with a row of the error table."""
    refused = []
    for name, task, _ in begun:
        if task.done() and (error := task.exception()) is not None:
            assert isinstance(error, RequestRefused)
            assert (error.reason, error.retry_delay_ms > 0) == ("OVERLOADED", True)
            refused.append(name)
    return refused


async def end(readers: Readers) -> None:
    for _, task, _ in readers.tasks:
        task.cancel()
    await asyncio.gather(*(task for _, task, _ in readers.tasks), return_exceptions=True)


@pytest.mark.parametrize("waiting", ["other", "hog/2/x", "hog/1/y"])
@virtual_time
async def test_a_message_that_does_not_come_is_given_up_for_a_sender_with_fewer_where_all_places_are_taken(
    waiting: str,
) -> None:
    bounds = ReadBounds(4, 4, 4, 4, last=0)
    readers = Readers(Reading(bounds, long_s=0.01, hurry_s=0.01), bounds)
    stalled = [readers.begin("hog/1/x") for _ in range(4)]
    await settle(readers)
    other = readers.begin(waiting)
    other[2].set()
    assert await asyncio.wait_for(other[1], 60) == waiting
    assert await refusals(readers, stalled) == ["hog/1/x"]
    await end(readers)


@virtual_time
async def test_calls_that_wait_for_their_own_senders_end_no_uploads() -> None:
    """Sixty-four large ones of one tenant, each of which takes many times as long as may be where places are few."""
    readers = Readers(Reading(long_s=0.001, hurry_s=0.001), ReadBounds())
    slow = readers.begin("other/1/acme")
    uploads = [readers.begin("host/1/acme") for _ in range(64)]
    for done in range(0, 64, 8):
        await asyncio.sleep(0.01)
        for _, _, come in uploads[done : done + 8]:
            come.set()
    await asyncio.wait_for(asyncio.gather(*(task for _, task, _ in uploads)), 60)
    slow[2].set()
    await slow[1]


@virtual_time
async def test_half_open_calls_of_a_host_do_not_keep_its_last_places() -> None:
    readers = Readers(Reading(long_s=LONG_S, hurry_s=0.01), ReadBounds())
    half_open = [readers.begin(f"host/{connection}/{tenant}") for connection in range(20) for tenant in range(20)]
    await settle(readers)
    for _ in range(3):
        innocent = readers.begin("host/innocent/acme")
        innocent[2].set()
        assert await asyncio.wait_for(innocent[1], 60)
        elsewhere = readers.begin("elsewhere")
        elsewhere[2].set()
        await settle(readers)
        assert elsewhere[1].done()  # without having waited
    refused = await refusals(readers, half_open)
    assert 0 < len(refused) < 400
    await end(readers)


@virtual_time
async def test_a_message_that_never_comes_is_given_up_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MESSAGE_TIMEOUT_S", 0.05)
    readers = Readers(Reading(ONE), ONE)
    _, reading, _ = readers.begin("slow")
    await settle(readers)
    _, waiting, _ = readers.begin("slow")
    with pytest.raises(RequestRefused, match="did not arrive within") as refused:
        await asyncio.wait_for(reading, 60)
    assert refused.value.reason == "INVALID_REQUEST"
    with pytest.raises(RequestRefused) as refused:
        await asyncio.wait_for(waiting, 60)
    assert refused.value.reason in ("OVERLOADED", "INVALID_REQUEST")
