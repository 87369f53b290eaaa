"""How long an event loop keeps what is due waiting: a step that computes for long holds up every stream."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from trunkline_runtime.log import get_logger

INTERVAL_S = 0.02  # a step is measured too short by as much as this
NOTABLE_S = 0.25  # goes into the log, so that what holds up a server can be found


class LoopLag:
    """The longest lag, in seconds, since it was last taken."""

    def __init__(self) -> None:
        self._most_s = 0.0

    @asynccontextmanager
    async def watching(self) -> AsyncIterator["LoopLag"]:
        """run() meanwhile."""
        task = asyncio.create_task(self.run())
        try:
            yield self
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def take(self) -> float:
        """Seconds; the next one counts from now."""
        most_s, self._most_s = self._most_s, 0.0
        return most_s

    def note(self, lag_s: float) -> None:
        """Something waited for so long."""
        self._most_s = max(self._most_s, lag_s)

    async def run(self) -> None:
        """Watches the running loop for ever."""
        now_s = asyncio.get_running_loop().time
        while True:
            due_s = now_s() + INTERVAL_S
            await asyncio.sleep(INTERVAL_S)
            lag_s = now_s() - due_s
            self.note(lag_s)
            if lag_s >= NOTABLE_S:
                get_logger().warning("event loop held up", lag_ms=round(lag_s * 1e3))
