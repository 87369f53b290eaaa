"""Messages are read a few at a time, and no account keeps the others from having theirs read."""

import asyncio
from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trunkline.status import RequestRefused
from trunkline_router import reading as module
from trunkline_router.reading import Reading

MOST, MOST_OF_ACCOUNT = 5, 2
LONG_S = 3600.0


class Readers:
    """Calls that hold their places until they are told, and what must be true of them all the time."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.open: Counter[str] = Counter()
        self.tasks: list[tuple[str, asyncio.Task[str], asyncio.Event]] = []

    def begin(self, account: str) -> tuple[str, asyncio.Task[str], asyncio.Event]:
        come = asyncio.Event()
        reader = account, asyncio.create_task(self._read(account, come)), come
        self.tasks.append(reader)
        return reader

    async def _read(self, account: str, come: asyncio.Event) -> str:
        async with self.reading.place(account):
            self.open[account] += 1
            try:
                assert self.open.total() <= MOST
                assert self.open[account] <= MOST_OF_ACCOUNT
                await come.wait()
            finally:
                self.open[account] -= 1
        return account


async def settle(readers: Readers) -> None:
    """Until nothing more happens by itself."""
    unchanged, last = 0, None
    while unchanged < 5:
        await asyncio.sleep(0)
        now = (len(asyncio.all_tasks()), +readers.open)
        unchanged, last = (unchanged + 1, now) if now == last else (0, now)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6))
def test_places_are_all_used_and_none_is_lost_whoever_comes_ends_or_is_cancelled(seed: int, accounts: int) -> None:
    async def play() -> None:
        draw = Random(seed)
        readers = Readers(Reading(MOST, MOST_OF_ACCOUNT, hurry_s=LONG_S))
        for _ in range(80):
            action = draw.random()
            if action < 0.5 or not readers.tasks:
                readers.begin(str(draw.randrange(accounts)))
            else:
                _, task, come = readers.tasks.pop(draw.randrange(len(readers.tasks)))
                come.set() if action < 0.75 else task.cancel()
            if draw.random() < 0.5:  # else several things happen in one turn of the loop
                await settle(readers)
                present = Counter(account for account, task, _ in readers.tasks if not task.done())
                possible = sum(min(count, MOST_OF_ACCOUNT) for count in present.values())
                assert readers.open.total() == min(MOST, possible)
        for _, _, come in readers.tasks:
            come.set()
        await asyncio.wait_for(asyncio.gather(*(task for _, task, _ in readers.tasks)), 10)
        assert not readers.reading._waiting
        assert not readers.reading._taken
        assert not readers.reading._reading
        assert readers.reading._free == MOST

    asyncio.run(play())


async def test_accounts_that_wait_take_turns() -> None:
    readers = Readers(Reading(1, 1, hurry_s=LONG_S))
    holding = readers.begin("first")
    await settle(readers)
    order = [readers.begin(account) for account in "aaaaabbc"]
    for _, _, come in order:
        come.set()
    await settle(readers)
    ended: list[str] = []
    for account, task, _ in order:
        task.add_done_callback(lambda _, account=account: ended.append(account))
    holding[2].set()
    await asyncio.gather(*(task for _, task, _ in order))
    assert ended == list("abcabaaa")


async def test_a_message_that_does_not_come_is_given_up_where_another_one_waits() -> None:
    readers = Readers(Reading(2, 2, hurry_s=0.01))
    stalled = [readers.begin("slow") for _ in range(2)]
    await settle(readers)
    other = readers.begin("other")
    other[2].set()
    assert await asyncio.wait_for(other[1], 10) == "other"
    (refused,) = [task for _, task, _ in stalled if task.done()]
    assert isinstance(error := refused.exception(), RequestRefused)
    assert (error.reason, error.retry_delay_ms > 0) == ("OVERLOADED", True)
    for _, task, _ in stalled:
        task.cancel()


async def test_a_message_that_never_comes_is_given_up_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "READ_TIMEOUT_S", 0.01)
    _, task, _ = Readers(Reading()).begin("slow")
    with pytest.raises(RequestRefused, match="did not arrive within"):
        await asyncio.wait_for(task, 10)
