"""Everything that is kept of requests is bounded: after hours of traffic a router's memory is as large as before."""

import asyncio
import gc
import resource
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import grpc
import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from tests.router.cluster import Cluster, cluster, refusal
from tests.router.fake_worker import FakeWorker
from tests.router.scraping.scrape_rig import scrape
from trunkline.status import no_worker
from trunkline.v1.fleet_pb2 import WatchFleetRequest
from trunkline.v1.inference_pb2 import GenerateRequest, TokenIds
from trunkline.v1.worker_pb2 import Gap, PrefillChunk, Timeline
from trunkline_router.access.access import Tenants
from trunkline_router.edge.http_call import Edge
from trunkline_router.observe.metrics.request_metrics import RequestCounts
from trunkline_router.observe.recent.recent_requests import RecentRequests
from trunkline_router.observe.tracing.request_traces import RequestTraces
from trunkline_router.record.request_observer import RequestObserver
from trunkline_router.request.failover import FailoverLimits
from trunkline_router.workers.output_claims import MAX_CHUNKS, MAX_GAPS
from trunkline_runtime.telemetry.span_queue import span_queue

NUM_PROMPTS = 300  # so that the fake worker's own memory is bounded
BEFORE, AFTER, WINDOWS = 1500, 400, 4  # requests: the first fill all rings; then as many windows of `AFTER`
MOST_FILLED = 64 << 20  # bytes: of the rings, with timelines as large as they may be, and of what is loaded once
# Bytes, less than 3 kB a request, in at least one window: what is kept grows in all of them, and free places between
# what is kept in some.
MOST_GROWN = 1 << 20
LARGEST = Timeline(chunks=[PrefillChunk(tokens=1 << 31)] * MAX_CHUNKS, gaps=[Gap()] * MAX_GAPS)


class Discards(SpanExporter):
    """A collector that takes everything."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        assert encode_spans(spans).resource_spans
        return SpanExportResult.SUCCESS


async def serve(router: Cluster, worker: FakeWorker, numbers: range) -> None:
    """Requests of many tenants, each with a different trace. One in ten fails, and timelines are as large as may be."""
    for number in numbers:
        metadata = (
            ("x-trunkline-tenant", f"tenant-{number % 200}"),
            ("traceparent", f"00-{number + 1:032x}-{number + 1:016x}-01"),
        )
        prompt = [number % NUM_PROMPTS % 90 + 3, *range(3, 23)]
        request = GenerateRequest(token_ids=TokenIds(ids=prompt), request_id=f"request-{number}")
        call = router.stub.Generate(request, metadata=metadata)
        choice = await worker.arrived.get()
        if number % 10 == 0:
            choice.fail(no_worker("lost"))
            await refusal(call)
        else:
            choice.tokens(2, finish=True, timeline=LARGEST)
            assert [response async for response in call]
        worker.submits.clear()
        worker.messages.clear()
    await scrape(router.http_port)


async def watch(router: Cluster) -> None:
    """The sampler works, and the page is made."""
    with suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
        async for _ in router.fleet.WatchFleet(WatchFleetRequest()):
            pass


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.slow
async def test_traffic_leaves_the_memory_of_all_that_listens_flat() -> None:
    """Of a whole router: ring of requests, metrics, traces, prefixes, sampler, scraper, watcher. Messages of protobuf
    are kept outside of Python's memory, so the process's own is measured."""
    queue, recent, tenants = span_queue(Discards(), Resource.create()), RecentRequests(), Tenants()
    counted = RequestCounts(tenants)
    traces = RequestTraces(queue, slow_s=2.0)
    observer = RequestObserver(listeners=[traces.request_ended, counted.request_ended, recent.request_ended])
    worker = FakeWorker("w0", answer=None)
    limits = FailoverLimits(max_resumptions=0)
    async with cluster(worker, observer=observer, recent=recent, tenants=tenants, edge=Edge, failover=limits) as router:
        watching = asyncio.create_task(watch(router))
        empty = resident_bytes()
        await serve(router, worker, range(BEFORE))
        full = [resident_bytes()]
        for begin in range(BEFORE, BEFORE + WINDOWS * AFTER, AFTER):
            await serve(router, worker, range(begin, begin + AFTER))
            full.append(resident_bytes())
        assert not watching.done()
        watching.cancel()
        await watching
    queue.close()
    assert queue.counts.exported > 0
    assert full[0] - empty < MOST_FILLED
    grown = [after - before for before, after in pairwise(full)]
    assert min(grown) < MOST_GROWN, f"{[size // AFTER for size in grown]} bytes a request"
