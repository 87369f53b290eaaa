"""Large messages that arrive together are handed on one after the other, and an account's at its pace."""

import asyncio
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import uvloop

from trunkline_router.access.gate.message_turns import (
    ACCOUNT_BYTES_PER_S,
    LARGE_BYTES,
    MAX_AHEAD_S,
    TURN_BYTES,
    MessageTurns,
    taken_in_turn,
)

LARGEST = 8 << 20


class Calls:
    """Calls whose messages arrive when they are told, and what was taken in each turn of the loop."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.turns = MessageTurns(lambda: self.now_s)
        self.in_turn: list[int] = [0]
        self.taken: list[str] = []

    async def call(self, account: str, arrival: "asyncio.Future[int]") -> int:
        num_bytes = 0

        async def reading() -> int:
            return await arrival

        try:
            num_bytes = await taken_in_turn(reading(), lambda: self.turns.turn(account))
            self.in_turn[-1] += num_bytes
            self.taken.append(account)
        finally:
            self.turns.took(account, num_bytes)
        return num_bytes

    async def watch_turns(self, over: asyncio.Event) -> None:
        while not over.is_set():
            await asyncio.sleep(0)
            self.in_turn.append(0)
            self.now_s += 0.001


@pytest.mark.parametrize("seed", range(8))
async def test_what_arrives_together_is_taken_in_bounded_portions_and_nothing_is_left(seed: int) -> None:
    draw, calls, over = Random(seed), Calls(), asyncio.Event()
    watching = asyncio.create_task(calls.watch_turns(over))
    loop = asyncio.get_running_loop()
    arrivals: list[asyncio.Future[int]] = [loop.create_future() for _ in range(60)]
    tasks = [asyncio.create_task(calls.call(str(draw.randrange(20)), arrival)) for arrival in arrivals]
    await asyncio.sleep(0)
    sizes = [draw.choice([100, 10_000, LARGE_BYTES + 1, TURN_BYTES, 4 << 20, LARGEST]) for _ in arrivals]
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
    assert max(calls.in_turn) < 2 * TURN_BYTES + LARGEST
    assert not calls.turns._waiting


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


async def test_an_account_ahead_of_its_pace_waits_and_others_do_not() -> None:
    calls = Calls()

    async def arrived(num_bytes: int) -> int:
        await asyncio.sleep(0)
        return num_bytes

    async def take(account: str, num_bytes: int) -> None:
        arrival = asyncio.ensure_future(arrived(num_bytes))
        await calls.call(account, arrival)

    while calls.turns._ahead_s("hog") <= MAX_AHEAD_S:
        await take("hog", LARGEST)
    waiting = deque(asyncio.create_task(take("hog", 10)) for _ in range(3))
    for _ in range(5):
        await take("other", 10)
    assert not any(task.done() for task in waiting)
    calls.now_s += calls.turns._ahead_s("hog")
    await take("other", TURN_BYTES)  # whatever comes next looks at the clock
    await asyncio.wait_for(asyncio.gather(*waiting), 60)
    assert LARGEST / ACCOUNT_BYTES_PER_S > MAX_AHEAD_S, "two of the largest messages are not read at once"


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_an_account_within_its_rate_does_not_wait_for_one_that_is_ahead(run: Callable[[Any], None]) -> None:
    async def scene() -> None:
        turns = MessageTurns(lambda: 0.0)
        await turns.turn("flood")
        turns.took("flood", 3600 * ACCOUNT_BYTES_PER_S)
        waiting = asyncio.create_task(turns.turn("flood"))
        for _ in range(5):
            await asyncio.sleep(0)
        async with asyncio.timeout(20):
            await turns.turn("other")
        assert not waiting.done()
        waiting.cancel()

    run(scene())
