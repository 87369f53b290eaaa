"""The lag of an event loop: how long due callbacks wait. A callback that runs for long delays every stream."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from trunkline_runtime.log import get_logger

INTERVAL_S = 0.02  # a delay is measured too short by up to this time
NOTABLE_S = 0.25  # a lag of this length is logged, so that its cause can be found


class LoopLag:
    """Keeps the longest lag, in seconds, since the last take()."""

    def __init__(self) -> None:
        self._most_s = 0.0

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

    def take(self) -> float:
        """Returns the longest lag in seconds, and resets it."""
        most_s, self._most_s = self._most_s, 0.0
        return most_s

    def note(self, lag_s: float) -> None:
        """Records a lag."""
        self._most_s = max(self._most_s, lag_s)

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
