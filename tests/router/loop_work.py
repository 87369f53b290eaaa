"""How much work the event loop does before others get their turn, however busy the machine is."""

import asyncio
import contextlib
import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

INTERVAL_S = 0.002


class LoopWork:
    """longest_s: the most CPU time, in seconds, that this process took while a task that had slept for INTERVAL_S
    waited to go on. Threads count: while they hold the interpreter, the loop stands still."""

    longest_s = 0.0


@asynccontextmanager
async def watched_loop() -> AsyncIterator[LoopWork]:
    """Watches the running loop meanwhile. Garbage is not collected: a router spares what it made at its start, but here
    a collection would look at all that the tests before have left, which takes half a second."""
    work = LoopWork()
    was_enabled = gc.isenabled()
    gc.disable()

    async def watch() -> None:
        while True:
            before_s = time.process_time()
            await asyncio.sleep(INTERVAL_S)
            work.longest_s = max(work.longest_s, time.process_time() - before_s)

    task = asyncio.create_task(watch())
    await asyncio.sleep(0)
    try:
        yield work
        await asyncio.sleep(INTERVAL_S)  # what began last counts too
    finally:
        if was_enabled:
            gc.enable()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
