"""Things that are tried again and again until they work, with pauses that whoever cannot wait may end.

A router says that it has no worker only after it has looked: what it found half a pause ago may have changed since,
and another process of the same router, or another router, may have seen that already.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence

LOOK_AT_MOST_S = 1.0  # a worker that does not even refuse a connection is not there
ANSWERED_AT_MOST_S = 5.0  # one that has answered is, but its tokenizer has to be fetched and built
LOOK_APART_S = 0.2  # however many ask
MOST_LOOKING = 1000  # requests that wait for a look; each is held in memory meanwhile
PATIENCE_SHARE = 0.5  # of the time left to a request: it is to be told that nobody is there, and to have time for more


class Tries:
    """One such thing. Each try ends with pause(), or with worked() and then, some time, lost().

    has_answered: the present try has got so far that it may take longer
    """

    def __init__(self) -> None:
        self.has_answered = False
        self._works = False
        self._begun = 1  # tries
        self._over = 0  # the latest that ended, and did not work or works no longer
        self._hurry = asyncio.Event()
        self._change = asyncio.Event()

    def worked(self) -> None:
        self._works = True
        self._has_changed()

    def lost(self) -> None:
        """What worked does so no longer."""
        self._works = False

    async def pause(self, pause_s: float) -> None:
        """A try is over. Returns when the next one begins."""
        self.has_answered = self._works = False
        self._over = self._begun
        self._has_changed()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._hurry.wait()
        self._hurry.clear()
        self._begun += 1

    async def one_more(self) -> None:
        """Returns when it works, or when a whole try is over that began after this was called."""
        begun = self._begun
        while not self._works and self._over <= begun:
            self._hurry.set()
            await self._change.wait()

    def _has_changed(self) -> None:
        self._change.set()
        self._change = asyncio.Event()


class Look:
    """Has everything tried once more that gives a router its workers; one look for all who ask before it begins.

    first: what is tried first, because it may give rise to some of `then`
    """

    def __init__(self, first: Sequence[Tries], then: Callable[[], Sequence[Tries]]) -> None:
        self._first = first
        self._then = then
        self._under_way: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None  # has not begun yet
        self._next_s = 0.0  # not before
        self._looking = 0

    async def until(
        self, is_found: Callable[[], bool], change: Callable[[], asyncio.Event], time_left_s: float | None = None
    ) -> bool:
        """Looks until it is found, all has been tried, or it takes too long; returns whether it is found. `change` is
        set whenever that may have changed."""
        if self._looking >= MOST_LOOKING or not (self._first or self._then()):
            return is_found()
        self._looking += 1
        try:
            return await self._until(is_found, change, time_left_s)
        finally:
            self._looking -= 1

    async def _until(
        self, is_found: Callable[[], bool], change: Callable[[], asyncio.Event], time_left_s: float | None
    ) -> bool:
        clock_s = asyncio.get_running_loop().time
        most_s = float("inf") if time_left_s is None else time_left_s * PATIENCE_SHARE
        until_s, answered_until_s = (clock_s() + min(s, most_s) for s in (LOOK_AT_MOST_S, ANSWERED_AT_MOST_S))
        look = self._one_more()
        while True:
            changed = asyncio.ensure_future(change().wait())
            try:
                if is_found():
                    return True
                now_s = clock_s()
                if now_s >= until_s and any(tries.has_answered for tries in self._then()):
                    until_s = min(now_s + LOOK_APART_S, answered_until_s)
                if look.done() or now_s >= until_s:
                    return False
                await asyncio.wait({look, changed}, timeout=until_s - now_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                changed.cancel()

    def _one_more(self) -> asyncio.Task[None]:
        """A look that has not begun."""
        if self._next is None:
            self._next = asyncio.create_task(self._look(self._under_way))
        return self._next

    async def _look(self, before: asyncio.Task[None] | None) -> None:
        clock_s = asyncio.get_running_loop().time
        if before is not None:
            await before
        await asyncio.sleep(self._next_s - clock_s())
        self._under_way, self._next = self._next, None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ANSWERED_AT_MOST_S):
                await _one_more_each(self._first)
                await _one_more_each(self._then())
        self._next_s = clock_s() + LOOK_APART_S


async def _one_more_each(tries: Sequence[Tries]) -> None:
    await asyncio.gather(*(one.one_more() for one in tries))
