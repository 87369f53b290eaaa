"""Repeated attempts at a connection or a lookup, with pauses that a waiting request can end."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from math import inf

SILENT_AT_MOST_S = 1.0  # a worker that does not even refuse a connection in this time is taken for absent
ANSWERED_AT_MOST_S = 5.0  # a worker that has answered is present, but its tokenizer must be fetched and built


class ConnectAttempts:
    """The attempts at one address or name. An attempt that fails ends with pause(); one that works lasts until lost().

    is_paused: no attempt is under way
    begun_s: when the present attempt began, or else the last one
    tried_s: when the latest attempt that is over began
    model: the model that the present attempt has found there
    works: the present attempt has succeeded, and what it found is not lost
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self.is_paused = False
        self.begun_s = clock_s()
        self.tried_s = -inf
        self.model: str | None = None
        self.works = False
        self._clock_s = clock_s
        self._since_s = self.begun_s  # time of the last progress
        self._hurry = asyncio.Event()
        self._changed = asyncio.Event()  # the state of the present attempt has changed

    def answered(self, model: str) -> None:
        """A worker has answered that serves this model."""
        self.model, self._since_s = model, self._clock_s()
        self._changed.set()

    def worked(self) -> None:
        """The present attempt has succeeded."""
        self.works = True
        self._changed.set()

    def lost(self) -> None:
        """What the attempt found is lost: another attempt is about to begin."""
        self.works = False
        self.model, self._since_s = None, self._clock_s()
        self._changed.set()

    async def pause(self, pause_s: float) -> None:
        """An attempt is over. Returns when the next one should begin."""
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

    def may_succeed(self, now_s: float) -> bool:
        """Whether an attempt is under way that has not been silent for too long, and so is worth waiting for."""
        patience_s = SILENT_AT_MOST_S if self.model is None else ANSWERED_AT_MOST_S
        return not self.is_paused and now_s - self._since_s < patience_s

    async def outcome(self, answered_at_most_s: float) -> bool:
        """Waits for the end of the present attempt, and returns whether it succeeded. It fails if it is silent for
        SILENT_AT_MOST_S, or has answered and then makes no progress for `answered_at_most_s`."""
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
        """Returns when what the attempt found is lost and the pause after that is over."""
        while self.works or self.is_paused:
            self._changed.clear()
            await self._changed.wait()
