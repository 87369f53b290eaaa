"""The router that is measured as observed is observed, and the other one is not."""

import asyncio
import os
import re
import sys
import time
from pathlib import Path

import pytest

from trunkline_bench.observation.observer import SCRAPE_INTERVAL_S, Observer
from trunkline_bench.observation.router_cost import HTTP, SPANS, Observed, routers, works
from trunkline_bench.servers.cpu_time import cpu_s

PATIENCE_S = 60.0
PROMETHEUS = Path(__file__).parents[3] / "deploy/observability/prometheus.yaml"
EXPORTED = 'outcome="exported"'
ENDED = "trunkline_router_tenant_requests_total"


@pytest.mark.slow
async def test_one_router_exports_spans_and_is_scraped_and_watched() -> None:
    async with routers(None, on_first=True) as both:
        for number, work in enumerate(works(share=0.05)[1:4:2]):  # streams, and requests that may be traced
            assert (await both.pair(work, on_first=bool(number % 2))).ratio > 0
        seen = both.observer.seen
        assert seen.views
        async with asyncio.timeout(PATIENCE_S):
            while not seen.sample(SPANS, EXPORTED):
                await both.observer.scrape()
        observed = Observed()
        observed.add(seen)
        assert "0 failed, 0 dropped" in str(observed)
        other = Observer(both.off[HTTP].address)
        await other.scrape()
    labels = 'lane="standard",result="ok",tenant=""'
    assert other.seen.sample(SPANS, EXPORTED) == 0
    assert other.seen.sample(ENDED, labels) > 0


def test_a_router_is_scraped_as_often_as_our_prometheus_scrapes() -> None:
    (interval,) = re.findall(r"scrape_interval: (\d+)s", PROMETHEUS.read_text())
    assert float(interval) == SCRAPE_INTERVAL_S


async def test_a_router_that_refuses_the_observer_is_an_error() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n")
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    async with server:
        observer = Observer(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        with pytest.raises(OSError, match=r"/metrics: HTTP/1\.1 403 Forbidden"):
            await observer.scrape()


async def test_cpu_time_of_another_process_is_finer_than_a_clock_tick() -> None:
    burning = "import time\nwhile time.process_time() < 0.05: pass\nprint(time.process_time(), flush=True)\ninput()"
    pipe = asyncio.subprocess.PIPE
    other = await asyncio.create_subprocess_exec(sys.executable, "-c", burning, stdin=pipe, stdout=pipe)
    assert other.stdout is not None
    own_s = float(await other.stdout.readline())
    assert own_s <= cpu_s(other.pid) < own_s + 0.1
    other.kill()
    await other.wait()
    with pytest.raises(ProcessLookupError):
        cpu_s(other.pid)
    assert cpu_s(os.getpid()) <= time.process_time()
