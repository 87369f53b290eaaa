"""A real router of two processes, each of which serves its own metrics; one is killed, and counts from zero."""

import asyncio
import os
import re
import signal
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx2
import pytest

from tests.router.cluster import PATIENCE_S
from tests.router.fake_worker import FakeWorker
from tests.router.router_process import start
from tests.router.scraping.scrape_rig import samples, scrape
from trunkline_bench.servers.ports import free_port, two_free_ports
from trunkline_runtime.telemetry.exposition import FRESH_S

REQUESTS, RESTARTS = "trunkline_router_requests_total", "trunkline_router_process_restarts_total"
NUM_REQUESTS = 16  # over a connection each: that all reach one of two processes happens once in 32,768 times


@dataclass
class Running:
    """A router of two processes."""

    process: asyncio.subprocess.Process
    port: int
    metrics_port: int  # of the first process
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

    async def metrics(self) -> Sequence[dict[str, float]]:
        """Of each process, once its answer is younger than all that was counted before."""
        await asyncio.sleep(1.1 * FRESH_S)
        return [await samples(self.metrics_port + number) for number in range(2)]


@asynccontextmanager
async def two_processes(worker: FakeWorker) -> AsyncIterator[Running]:
    port, metrics_port = free_port(), two_free_ports()
    process = await start(
        f"--port={free_port()}",
        f"--http-port={port}",
        f"--process-metrics-port={metrics_port}",
        f"--workers={worker.address}",
        "--processes=2",
    )
    running = Running(process, port, metrics_port)
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
async def test_each_process_tells_of_itself_and_a_replaced_one_counts_from_zero(router: Running) -> None:
    assert [await router.complete() for _ in range(NUM_REQUESTS)] == [200] * NUM_REQUESTS
    before = await router.metrics()
    assert sum(found[REQUESTS] for found in before) == NUM_REQUESTS
    assert all(found[REQUESTS] > 0 for found in before)
    expected = {"trunkline_router_processes": 1, RESTARTS: 0, "trunkline_router_pool_workers": 1}
    for found in before:
        assert {name: found[name] for name in expected} == expected
    assert (await scrape(router.port)).status_code == 404, "each scrape would reach another process"
    os.kill(router.children()[0], signal.SIGKILL)
    await router.until_said('"router process died"')
    await router.until_said('"router listening"', times=3)
    after = await router.metrics()
    assert sorted(found[RESTARTS] for found in after) == [0, 1]
    (replaced,) = [number for number in range(2) if after[number][RESTARTS]]
    assert after[replaced].get(REQUESTS, 0) == 0
    assert after[1 - replaced][REQUESTS] == before[1 - replaced][REQUESTS]


async def test_a_taken_port_for_metrics_is_one_line_whichever_process_would_have_it() -> None:
    first = two_free_ports()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first + 1))
        taken.listen()
        process = await start(
            f"--process-metrics-port={first}", "--workers=127.0.0.1:1", "--processes=2", "--port=0", "--http-port=0"
        )
        _, said = await process.communicate()
    assert process.returncode == 2
    problem = f"port {first + 1} on 127.0.0.1 is in use; choose another with --process-metrics-port"
    assert said.decode().splitlines() == [f"trunkline-router: {problem}"]


async def test_the_port_for_probes_cannot_be_one_of_those_for_metrics() -> None:
    first = two_free_ports()
    ports = (f"--process-metrics-port={first}", f"--health-port={first + 1}", "--port=0", "--http-port=0")
    process = await start(*ports, "--workers=127.0.0.1:1", "--processes=2")
    _, said = await process.communicate()
    assert process.returncode == 2
    problem = f"port {first + 1} is that of --health-port; choose another with --process-metrics-port"
    assert said.decode().splitlines() == [f"trunkline-router: {problem}"]


async def test_one_process_without_http_serves_its_metrics_and_nothing_else() -> None:
    port = free_port()
    arguments = (f"--port={free_port()}", "--http-port=-1", f"--process-metrics-port={port}", "--workers=127.0.0.1:1")
    running = Running(await start(*arguments), port, port)
    try:
        await running.until_said('"router listening"')
        assert "trunkline_router_ready 0.0" in (await scrape(port)).text
        async with httpx2.AsyncClient(timeout=PATIENCE_S, trust_env=False) as client:
            for path in ("/", "/health", "/v1/models", "/fleet/requests"):
                assert (await client.get(f"http://127.0.0.1:{port}{path}")).status_code == 404
            refused = await client.get(f"http://127.0.0.1:{port}/metrics", headers={"host": "page.example"})
            assert refused.status_code == 403, "as at the HTTP port"
    finally:
        running.process.terminate()
        await running.process.communicate()
