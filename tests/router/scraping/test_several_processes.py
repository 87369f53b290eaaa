"""A real router of two processes, one of which is killed: the answer stays coherent."""

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import pytest

from tests.router.cluster import PATIENCE_S
from tests.router.fake_worker import FakeWorker
from tests.router.router_process import start
from tests.router.scraping.scrape_rig import samples
from trunkline_bench.servers.ports import free_port

REQUESTS = "trunkline_router_requests_total"
NUM_REQUESTS = 16  # over a connection each: that all reach one of two processes happens once in 32,768 times
ALIKE = 8  # answers in a row that must be alike, so that both processes have given some


@dataclass
class Running:
    """A router of two processes."""

    process: asyncio.subprocess.Process
    port: int
    lines: list[str] = field(default_factory=list)

    async def until_said(self, pattern: str, times: int = 1) -> None:
        """Waits until the log has so many lines like this."""
        assert self.process.stderr is not None
        async with asyncio.timeout(3 * PATIENCE_S):
            while sum(re.search(pattern, line) is not None for line in self.lines) < times:
                self.lines.append((await self.process.stderr.readline()).decode())

    def children(self) -> list[int]:
        """The two processes."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in children]

    async def complete(self) -> int:
        async with httpx2.AsyncClient(timeout=PATIENCE_S, trust_env=False) as client:
            url, body = f"http://127.0.0.1:{self.port}/v1/completions", {"model": "tiny", "prompt": "x"}
            return (await client.post(url, json=body)).status_code

    async def until_all_tell(self, expected: Mapping[str, float]) -> None:
        """Waits until every process tells these values."""
        alike = 0
        async with asyncio.timeout(2 * PATIENCE_S):
            while alike < ALIKE:
                found = await samples(self.port)
                alike = alike + 1 if {name: found.get(name) for name in expected} == expected else 0


@asynccontextmanager
async def two_processes(worker: FakeWorker) -> AsyncIterator[Running]:
    port = free_port()
    arguments = (f"--port={free_port()}", f"--http-port={port}", f"--workers={worker.address}", "--processes=2")
    process = await start(*arguments)
    running = Running(process, port)
    try:
        await running.until_said('"router listening"', times=2)
        yield running
    finally:
        process.terminate()
        await process.communicate()


@pytest.fixture
async def router() -> AsyncIterator[Running]:
    worker = await FakeWorker("w0").start()
    async with two_processes(worker) as running:
        yield running
    await worker.die()


@pytest.mark.slow
async def test_a_killed_process_loses_no_counter_and_either_one_tells_of_both(router: Running) -> None:
    assert [await router.complete() for _ in range(NUM_REQUESTS)] == [200] * NUM_REQUESTS
    everything = {REQUESTS: NUM_REQUESTS, "trunkline_router_processes": 2, "vllm:request_params_n_count": NUM_REQUESTS}
    await router.until_all_tell(everything | {"trunkline_router_process_restarts_total": 0})
    os.kill(router.children()[0], signal.SIGKILL)
    await router.until_said('"router process died"')
    after = await samples(router.port)
    assert after[REQUESTS] == NUM_REQUESTS
    await router.until_said('"router listening"', times=3)
    assert await router.complete() == 200
    everything |= {REQUESTS: NUM_REQUESTS + 1, "vllm:request_params_n_count": NUM_REQUESTS + 1}
    await router.until_all_tell(everything | {"trunkline_router_process_restarts_total": 1})
    # Each is a router of its own to workers; gauges of the same thing do not add up.
    assert (await samples(router.port))["trunkline_router_pool_workers"] == 1
