"""Places for work: turns by account, cancelled work begins again, and no place or job is ever lost."""

import asyncio
from collections.abc import Awaitable, Callable
from random import Random

import pytest

from trunkline.status import RequestRefused
from trunkline_router.prompts.fair_places import FairPlaces
from trunkline_router.prompts.fair_turns import Bounds

Begins = Callable[[], None]
WIDE = Bounds(10**6, 10**6, 10**9, 10**9)


def places(number: int = 2, of_one: int = 1, bounds: Bounds = WIDE, slice_s: float = 0.01) -> FairPlaces:
    return FairPlaces(number, of_one, bounds, slice_s=slice_s, refusal="too much waits")


class Work:
    """Runs until it is released. With `counts` its slice begins at once."""

    def __init__(self, *, counts: bool = True) -> None:
        self.runs = 0
        self.begun, self.released = asyncio.Event(), asyncio.Event()
        self._counts = counts

    async def __call__(self, begins: Begins) -> int:
        self.runs += 1
        self.begun.set()
        if self._counts:
            begins()
        await self.released.wait()
        return self.runs


def quick(answer: str = "done") -> Callable[[Begins], Awaitable[str]]:
    async def work(begins: Begins) -> str:
        begins()
        return answer

    return work


async def test_work_without_end_of_two_accounts_holds_up_no_third_one_and_is_run_again() -> None:
    room = places()
    hostile = [Work(), Work()]
    tasks = [asyncio.create_task(room.run(name, work, num_bytes=1)) for name, work in zip("ab", hostile, strict=True)]
    for work in hostile:
        await work.begun.wait()
    for _ in range(20):
        assert await room.run("innocent", quick(), num_bytes=1) == "done"
    assert sum(work.runs for work in hostile) == 2, "one is cut short, and waits for the other one"
    for work in hostile:
        work.released.set()
    assert sorted(await asyncio.gather(*tasks)) == [1, 2]
    assert room.is_idle


async def test_what_has_not_begun_to_work_is_not_cut_short() -> None:
    """A process that starts, say: its time is not the request's."""
    room = places(1, slice_s=0.0)
    starting = Work(counts=False)
    task = asyncio.create_task(room.run("a", starting, num_bytes=1))
    waits = asyncio.create_task(room.run("b", quick("b"), num_bytes=1))
    for _ in range(50):
        await asyncio.sleep(0)
    assert not waits.done()
    starting.released.set()
    assert (await task, await waits, starting.runs) == (1, "b", 1)


async def test_past_its_measure_an_account_is_refused_and_what_waits_is_done() -> None:
    room = places(3, bounds=Bounds(jobs_of_one=3, jobs_of_all=4, bytes_of_one=100, bytes_of_all=150), slice_s=60.0)
    works = [Work() for _ in range(3)]
    tasks = [asyncio.create_task(room.run("hog", work, num_bytes=30)) for work in works]
    await works[0].begun.wait()
    for num_bytes in (1, 11):  # a fourth job; eleven bytes too many
        with pytest.raises(RequestRefused, match="too much waits") as refused:
            await room.run("hog", quick(), num_bytes=num_bytes)
        assert refused.value.reason == "OVERLOADED"
        assert refused.value.retry_delay_ms > 0
    other = Work()
    tasks.append(asyncio.create_task(room.run("other", other, num_bytes=1)))
    await other.begun.wait()
    assert await room.run("innocent", quick(), num_bytes=1) == "done", "in the place of the hog's last one"
    with pytest.raises(RequestRefused, match="too much waits"):
        await tasks[2]
    for work in (*works, other):
        work.released.set()
    assert await asyncio.gather(*(tasks[i] for i in (0, 1, 3))) == [1, 1, 1]
    assert room.is_idle


async def test_what_work_raises_is_raised_and_its_place_is_free_again() -> None:
    room = places(1)

    async def fails(begins: Begins) -> None:
        begins()
        raise TimeoutError("its own")

    for _ in range(3):
        with pytest.raises(TimeoutError, match="its own"):
            await room.run("a", fails, num_bytes=1)
    assert await room.run("a", quick(), num_bytes=1) == "done"
    assert room.is_idle


@pytest.mark.parametrize("seed", range(20))
async def test_callers_that_leave_at_any_moment_leave_no_place_taken(seed: int) -> None:
    draw, room = Random(seed), places(3, 2, Bounds(8, 20, 10**9, 10**9), slice_s=0.0)

    async def works(begins: Begins) -> None:
        begins()
        for _ in range(draw.randrange(20)):
            await asyncio.sleep(0)

    tasks: list[asyncio.Task[None]] = []
    for _ in range(300):
        tasks.append(asyncio.create_task(room.run(draw.randrange(6), works, num_bytes=1)))
        for _ in range(draw.randrange(6)):
            await asyncio.sleep(0)
        if draw.random() < 0.5:
            draw.choice(tasks).cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(one) for one in ended} >= {type(None), asyncio.CancelledError}
    assert {type(one) for one in ended} <= {type(None), asyncio.CancelledError, RequestRefused}
    assert room.is_idle
    assert room._turns.num_free == 3
    assert not room._begins
    assert not room._ends
