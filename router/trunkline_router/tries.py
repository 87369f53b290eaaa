"""Things that are tried again and again until they work, with pauses that whoever cannot wait may end."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from math import inf

SILENT_AT_MOST_S = 1.0  # a worker that does not even refuse a connection is not there
ANSWERED_AT_MOST_S = 5.0  # one that has answered is, but its tokenizer has to be fetched and built


class Tries:
    """One such thing. Each try ends with pause(); one that works goes on, until what it came to is lost().

    is_paused: no try is under way
    begun_s: when the present try began, or else the last one
    tried_s: when the latest one that is over began
    model: what the present try has found to be served there
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self.is_paused = False
        self.begun_s = clock_s()
        self.tried_s = -inf
        self.model: str | None = None
        self._clock_s = clock_s
        self._since_s = self.begun_s  # it has got no further
        self._hurry = asyncio.Event()

    def answered(self, model: str) -> None:
        """Somebody is there, and will serve this model."""
        self.model, self._since_s = model, self._clock_s()

    def lost(self) -> None:
        """What worked does so no longer: it is about to be tried again."""
        self.model, self._since_s = None, self._clock_s()

    async def pause(self, pause_s: float) -> None:
        """A try is over. Returns when the next one begins."""
        self.is_paused, self.model, self.tried_s = True, None, self.begun_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._hurry.wait()
        self._hurry.clear()
        self.is_paused = False
        self.begun_s = self._since_s = self._clock_s()

    def hurry(self) -> None:
        """Ends the pause."""
        self._hurry.set()

    def may_come_to_something(self, now_s: float) -> bool:
        """Whether the try under way, if any, is worth waiting for: it has not been silent for too long."""
        patience_s = SILENT_AT_MOST_S if self.model is None else ANSWERED_AT_MOST_S
        return not self.is_paused and now_s - self._since_s < patience_s
