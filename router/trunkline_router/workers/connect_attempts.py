"""Things that are tried again and again until they work, with pauses that whoever cannot wait may end."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from math import inf

SILENT_AT_MOST_S = 1.0  # a worker that does not even refuse a connection is not there
ANSWERED_AT_MOST_S = 5.0  # one that has answered is, but its tokenizer has to be fetched and built


class ConnectAttempts:
    """One such thing. Each try ends with pause(); one that works goes on, until what it came to is lost().

    is_paused: no try is under way
    begun_s: when the present try began, or else the last one
    tried_s: when the latest one that is over began
    model: what the present try has found to be served there
    works: it has come to something, which is not lost
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self.is_paused = False
        self.begun_s = clock_s()
        self.tried_s = -inf
        self.model: str | None = None
        self.works = False
        self._clock_s = clock_s
        self._since_s = self.begun_s  # it has got no further
        self._hurry = asyncio.Event()
        self._changed = asyncio.Event()  # of the present try

    def answered(self, model: str) -> None:
        """A worker has answered, and will serve this model."""
        self.model, self._since_s = model, self._clock_s()
        self._changed.set()

    def worked(self) -> None:
        """The present try has come to something."""
        self.works = True
        self._changed.set()

    def lost(self) -> None:
        """What worked does so no longer: it is about to be tried again."""
        self.works = False
        self.model, self._since_s = None, self._clock_s()
        self._changed.set()

    async def pause(self, pause_s: float) -> None:
        """A try is over. Returns when the next one begins."""
        self.is_paused, self.model, self.tried_s = True, None, self.begun_s
        self._changed.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._hurry.wait()
        self._hurry.clear()
        self.is_paused = False
        self.begun_s = self._since_s = self._clock_s()
        self._changed.set()

    def hurry(self) -> None:
        """Ends the pause."""
        self._hurry.set()

    def may_come_to_something(self, now_s: float) -> bool:
        """Whether the try under way, if any, is worth waiting for: it has not been silent for too long."""
        patience_s = SILENT_AT_MOST_S if self.model is None else ANSWERED_AT_MOST_S
        return not self.is_paused and now_s - self._since_s < patience_s

    async def outcome(self, answered_at_most_s: float) -> bool:
        """Whether the present try comes to something, as soon as that is known. One that is silent for
        SILENT_AT_MOST_S, or has answered and gets no further for `answered_at_most_s`, does not."""
        while not self.works and not self.is_paused:
            patience_s = SILENT_AT_MOST_S if self.model is None else answered_at_most_s
            left_s = self._since_s + patience_s - self._clock_s()
            if left_s <= 0:
                return False
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._changed.wait()
        return self.works

    async def next(self) -> None:
        """Returns when what works is lost, and the pause that comes with that is over."""
        while self.works or self.is_paused:
            self._changed.clear()
            await self._changed.wait()
