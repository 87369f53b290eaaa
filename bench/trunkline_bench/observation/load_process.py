"""One client process for many loads: to start a process for each would take longer than a load."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from json import dumps, loads

from trunkline_bench.streaming.client import Load, Seen
from trunkline_bench.streaming.processes import process


class LoadProcess:
    """Runs loads, one after another."""

    def __init__(self, started: asyncio.subprocess.Process) -> None:
        self._started = started

    async def run(self, load: Load) -> Seen:
        """Runs a load. Raises SystemExit if the client fails."""
        stdin, stdout = self._started.stdin, self._started.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(dumps(asdict(load)).encode() + b"\n")
        told = await stdout.readline()
        if not told:
            raise SystemExit(f"bench-observation: the client failed: {load}")
        return Seen(**loads(told))


@asynccontextmanager
async def load_process() -> AsyncIterator[LoadProcess]:
    """A client that waits for loads."""
    async with process("trunkline_bench.streaming.client", stdin=asyncio.subprocess.PIPE) as started:
        yield LoadProcess(started)
