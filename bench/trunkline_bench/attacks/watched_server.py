"""A router or worker that measures the lag of its own event loop.

usage: python -m trunkline_bench.attacks.watched_server FILE router|worker FLAGS...

The process sleeps a few milliseconds again and again. For each tenth of a second it writes a line with the time, the
longest lag, and the longest lag less the time in which the thread was runnable without a core. The last figure is the
process's own fault, since it shares the cores with its attackers.
"""

import asyncio
import contextlib
import importlib
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INTERVAL_S = 0.002
WRITTEN_EVERY_S = 0.1
# Of this thread: time on a core, time waiting for a core, number of time slices.
# https://docs.kernel.org/scheduler/sched-stats.html
SCHEDULING = "/proc/thread-self/schedstat"
# Of each server, the module of its command, and the one from which that takes serve().
SERVERS = {
    "router": ("trunkline_router.main", "trunkline_router.router"),
    "worker": ("trunkline_worker.main", "trunkline_worker.main"),
}


@dataclass(frozen=True, slots=True)
class LoopLag:
    """The longest lags in a period, in ms. own_ms: without the wait for a core"""

    lag_ms: float = 0.0
    own_ms: float = 0.0


def lag_between(path: Path, from_s: float, to_s: float) -> LoopLag:
    """The longest lags in the file between two times of the system's monotonic clock.

    A period without lines counts as lag."""
    lag = own = last_s = 0.0
    for line in path.read_text().splitlines():
        last_s, lag_ms, own_ms = map(float, line.split())
        if from_s <= last_s <= to_s + WRITTEN_EVERY_S:
            lag, own = max(lag, lag_ms), max(own, own_ms)
    silent_ms = (to_s - last_s - 2 * WRITTEN_EVERY_S) * 1e3
    return LoopLag(max(lag, silent_ms), max(own, silent_ms))


@asynccontextmanager
async def watching(path: Path) -> AsyncIterator[None]:
    """Writes the lag of the running event loop to the file until the context ends."""
    task = asyncio.create_task(_watch(path))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _watch(path: Path) -> None:
    scheduling = os.open(SCHEDULING, os.O_RDONLY)
    lag_ms = own_ms = 0.0
    written_s = time.monotonic()
    try:
        with path.open("w", buffering=1) as file:
            while True:
                without_core_s, due_s = _without_core_s(scheduling), time.monotonic() + INTERVAL_S
                await asyncio.sleep(INTERVAL_S)
                now_s = time.monotonic()
                late_ms = (now_s - due_s) * 1e3
                lag_ms = max(lag_ms, late_ms)
                own_ms = max(own_ms, late_ms - (_without_core_s(scheduling) - without_core_s) * 1e3)
                if now_s - written_s >= WRITTEN_EVERY_S:
                    file.write(f"{now_s:.3f} {lag_ms:.2f} {max(0.0, own_ms):.2f}\n")
                    lag_ms, own_ms, written_s = 0.0, 0.0, now_s
    finally:
        os.close(scheduling)


def _without_core_s(scheduling: int) -> float:
    return int(os.pread(scheduling, 100, 0).split()[1]) / 1e9


def main() -> None:
    path, server, *flags = sys.argv[1:]
    modules: list[Any] = [importlib.import_module(name) for name in SERVERS[server]]
    command, module = modules
    serve = module.serve

    async def watched(*arguments: Any) -> Any:
        async with watching(Path(path)):
            return await serve(*arguments)

    module.serve = watched
    sys.argv[1:] = flags
    command.main()


if __name__ == "__main__":
    main()
