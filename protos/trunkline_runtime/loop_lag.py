"""The lag of an event loop: how long due callbacks wait. A callback that runs for long delays every stream."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from trunkline_runtime.log import get_logger

INTERVAL_S = 0.02  # a delay is measured too short by up to this time
NOTABLE_S = 0.25  # a lag of this length is logged, so that its cause can be found
RECENT_S = 60.0  # as long as most pauses between two scrapes, so that a scraper misses no lag
PART_S = 10.0
NUM_PARTS = 1 + int(RECENT_S / PART_S)


class LoopLag:
    """Keeps the longest lag of the last RECENT_S to RECENT_S + PART_S. Any number of readers sees it.

    now_s: a monotonic clock
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._parts: deque[tuple[int, float]] = deque(maxlen=NUM_PARTS)  # number of the part, and its longest lag

    @asynccontextmanager
    async def watching(self) -> AsyncIterator["LoopLag"]:
        """Executes run() in the background inside the block."""
        task = asyncio.create_task(self.run())
        try:
            yield self
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def recent_s(self) -> float:
        """Returns the longest recent lag in seconds."""
        oldest = self._part() - NUM_PARTS
        return max((lag_s for part, lag_s in self._parts if part > oldest), default=0.0)

    def note(self, lag_s: float) -> None:
        """Records a lag."""
        part = self._part()
        if self._parts and self._parts[-1][0] == part:
            self._parts[-1] = (part, max(self._parts[-1][1], lag_s))
        else:
            self._parts.append((part, lag_s))

    async def run(self) -> None:
        """Measures the running loop's lag. Never returns."""
        now_s = asyncio.get_running_loop().time
        while True:
            due_s = now_s() + INTERVAL_S
            await asyncio.sleep(INTERVAL_S)
            lag_s = now_s() - due_s
            self.note(lag_s)
            if lag_s >= NOTABLE_S:
                get_logger().warning("event loop held up", lag_ms=round(lag_s * 1e3))

    def _part(self) -> int:
        return int(self._now_s() / PART_S)
