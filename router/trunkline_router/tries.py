"""Things that are tried again and again until they work, with pauses that whoever cannot wait may end.

A router says that it has no worker only after it has looked: what it found half a pause ago may have changed since,
and another process of the same router, or another router, may have seen that already.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence

LOOK_AT_MOST_S = 5.0  # a worker that does not even refuse a connection is not there
LOOK_APART_S = 0.2  # however many ask


class Tries:
    """One such thing. It calls pause() between two tries, and worked() once one has."""

    def __init__(self) -> None:
        self._ended = asyncio.Event()  # the present or last try
        self._hurry = asyncio.Event()
        self._is_pausing = False

    def worked(self) -> None:
        self._ended.set()

    async def pause(self, pause_s: float) -> None:
        """A try is over. Returns when the next one is due."""
        self._ended.set()
        self._hurry.clear()
        self._is_pausing = True
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._hurry.wait()
        finally:
            self._is_pausing = False
            self._ended.clear()

    async def now(self) -> None:
        """Returns when the try is over that is under way, or that begins with this."""
        if self._is_pausing:
            self._ended.clear()
            self._hurry.set()
        await self._ended.wait()


class Look:
    """Has everything tried now that gives a router its workers; one look for all who ask meanwhile.

    first: what is tried first, because it may give rise to some of `then`
    """

    def __init__(
        self, first: Sequence[Tries], then: Callable[[], Sequence[Tries]], *, at_most_s: float = LOOK_AT_MOST_S
    ) -> None:
        self._first = first
        self._then = then
        self._at_most_s = at_most_s
        self._under_way: asyncio.Task[None] | None = None
        self._next_s = 0.0

    async def until(self, is_found: Callable[[], bool], change: Callable[[], asyncio.Event]) -> bool:
        """Looks until it is found, or all has been tried; returns whether it is. `change` is set whenever that may
        have changed."""
        if self._under_way is None or self._under_way.done():
            self._under_way = asyncio.create_task(self._look())
        look = self._under_way
        while True:
            changed = asyncio.ensure_future(change().wait())
            try:
                if is_found():
                    return True
                if look.done():
                    return False
                await asyncio.wait({look, changed}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                changed.cancel()

    async def _look(self) -> None:
        now_s = asyncio.get_running_loop().time
        await asyncio.sleep(self._next_s - now_s())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._at_most_s):
                await _all_now(self._first)
                await _all_now(self._then())
        self._next_s = now_s() + LOOK_APART_S


async def _all_now(tries: Sequence[Tries]) -> None:
    await asyncio.gather(*(one.now() for one in tries))
