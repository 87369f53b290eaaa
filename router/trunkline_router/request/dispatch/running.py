"""Counts the running requests, which a router waits for before it stops."""

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import TypeVar

from trunkline.status import no_worker

T = TypeVar("T")


class Running:
    """The running requests of a router. At a stop, waits that do not need the router end once no request needs it."""

    def __init__(self) -> None:
        self._count = 0
        self._needing = 0  # requests that need this router
        self._unneeded: set[asyncio.Timeout] = set()  # the waits of the others
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_stopping = False

    @property
    def is_stopping(self) -> bool:
        """Whether new requests are refused."""
        return self._is_stopping

    @property
    def num_running(self) -> int:
        """Requests that have begun and not ended."""
        return self._count

    async def stop(self) -> None:
        """Refuses new requests from now on. Returns when the last running request has ended."""
        self._is_stopping = True
        self._review()
        await self._idle.wait()

    def admitted(self) -> "Running":
        """Returns a context that counts a request while it runs. Entering it raises RequestRefused if the router is
        stopping."""
        return self

    def __enter__(self) -> None:
        if self._is_stopping:
            raise no_worker("this router is stopping; another one, or this one restarted, may serve you")
        self._count += 1
        self._needing += 1
        self._idle.clear()

    def __exit__(self, *_: object) -> None:
        self._count -= 1
        self._needing -= 1
        self._review()

    async def unneeded(self, coming: Awaitable[T]) -> T | None:
        """Waits for the next event of a running request that does not need the router until then. Returns None if the
        router stops first."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None) as wait:
                self._needing -= 1
                self._unneeded.add(wait)
                self._review()
                try:
                    return await coming
                finally:
                    self._needing += 1
                    self._unneeded.discard(wait)
        return None

    def _review(self) -> None:
        if self._is_stopping and not self._needing:
            waits, self._unneeded = self._unneeded, set()
            for wait in waits:
                wait.reschedule(asyncio.get_running_loop().time())
        if not self._count:
            self._idle.set()
