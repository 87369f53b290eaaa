"""The fleet as watchers see it, with real workers: figures, a request's way, a worker that is killed and one that
drains."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx2
import pytest

from tests.cluster.processes import Cluster, Process, Worker, running_cluster, script
from tests.worker.engine_rig import DEMO_MODEL
from trunkline import Client
from trunkline.v1 import fleet_pb2
from trunkline.v1.fleet_pb2 import DrainWorkerRequest, GetRequestRequest, WatchFleetRequest, WatchFleetResponse
from trunkline.v1.fleet_pb2_grpc import FleetServiceStub
from trunkline.v1.worker_pb2 import GetStatsRequest
from trunkline_bench.servers.ports import free_port

pytestmark = pytest.mark.slow

STORY = "Once upon a time, in a house at the edge of a wood, there lived a fox and a hare. "
WATCH_S = 240.0  # for failures only


@pytest.fixture(scope="module")
def pair() -> Iterator[Cluster]:
    with running_cluster(DEMO_MODEL, "--dtype=float32", "--kv-blocks=512", "--price-per-hour=2") as running:
        yield running


@contextmanager
def watching(cluster: Cluster) -> Iterator[Iterator[WatchFleetResponse]]:
    stub: Any = FleetServiceStub(cluster.channel)
    call = stub.WatchFleet(WatchFleetRequest(), timeout=WATCH_S)
    try:
        yield call
    finally:
        call.cancel()


def state_of(view: WatchFleetResponse, worker: Worker) -> int:
    (state,) = (tile.state for tile in view.workers if tile.address == worker.address)
    return state


def until(views: Iterator[WatchFleetResponse], worker: Worker, state: int) -> None:
    assert any(state_of(view, worker) == state for view in views), "the stream has ended"


async def test_figures_are_those_that_the_workers_report(pair: Cluster) -> None:
    with watching(pair) as views:
        # A rate is the difference of two samples: the first of each worker has to lie before the requests.
        sampled = next(view for view in views if all(tile.HasField("sampled_unix_ms") for tile in view.workers))
        before_ms = sampled.at_unix_ms
        async with Client(pair.address, tenant="acme") as client:
            done = [await client.complete(STORY * 4 + str(number), max_tokens=24) for number in range(4)]
        output = sum(answer.usage.completion_tokens for answer in done)
        told = {worker.address: worker.stub.GetStats(GetStatsRequest(), timeout=60) for worker in pair.workers}
        ttfts_s = {name: stats.lanes[1].ttft_s.p50 for name, stats in told.items() if stats.lanes[1].ttft_s.p50}
        assert ttfts_s

        def is_of_all_requests(view: WatchFleetResponse) -> bool:
            """The first views were sampled while the requests ran."""
            shown = {tile.worker_id: tile.ttft_p50_s for tile in view.workers if tile.HasField("ttft_p50_s")}
            return shown == pytest.approx(ttfts_s, rel=0.3) and any(
                tree.roots and tree.roots[0].hits == pytest.approx(4, rel=0.2) for tree in view.prefixes.by_tenant
            )

        rates, shortest_s = 0.0, 1.0  # between two samples: on a busy machine they are not a second apart
        for view in views:
            rates = max(rates, sum(tile.output_tokens_per_s for tile in view.workers))
            shortest_s = min(shortest_s, (view.at_unix_ms - before_ms) / 1e3)
            before_ms = view.at_unix_ms
            if rates and is_of_all_requests(view):
                break
    assert 0 < rates <= 2 * output / shortest_s, "a worker takes its samples at other moments"
    for tile in view.workers:
        if tile.worker_id in ttfts_s:
            assert tile.kv.live_blocks + tile.kv.cached_blocks + tile.kv.free_blocks == 512
            assert tile.HasField("cost_per_million_output_tokens")
    (tree,) = view.prefixes.by_tenant
    assert tree.tenant == "acme"
    assert tree.roots[0].hits == pytest.approx(4, rel=0.2)
    assert tree.roots[0].tokens >= 64
    assert set(tree.roots[0].holders) <= {worker.address for worker in pair.workers}


async def test_the_way_of_a_request_is_told_to_the_chunk(pair: Cluster) -> None:
    async with Client(pair.address) as client:
        done = await client.complete("A prompt that has not been seen. " * 30, max_tokens=8, request_id="traced")
    stub: Any = FleetServiceStub(pair.channel)
    told = stub.GetRequest(GetRequestRequest(request_id="traced"), timeout=60)
    summary, (attempt,) = told.summary, told.attempts_made
    assert (summary.prompt_tokens, summary.completion_tokens) == (
        done.usage.prompt_tokens,
        done.usage.completion_tokens,
    )
    (choice,) = attempt.choices
    assert sum(chunk.tokens for chunk in choice.chunks) == summary.prompt_tokens - summary.cached_tokens
    assert attempt.start_s <= choice.admitted_s <= choice.first_token_s <= attempt.end_s
    assert sum(part.duration_s for part in told.ttft_parts) == pytest.approx(summary.ttft_s)
    assert {"tokenizer", "placement", "prefill"} <= {part.part for part in told.ttft_parts}
    assert len(told.placements[0].candidates) == 2
    assert told.cost > 0


async def test_each_of_several_processes_tells_of_the_requests_of_all(pair: Cluster) -> None:
    port, http_port = free_port(), free_port()
    workers = ",".join(worker.address for worker in pair.workers)
    process = Process(
        script("trunkline-router"),
        "--processes=2",
        f"--port={port}",
        f"--http-port={http_port}",
        f"--workers={workers}",
    )
    try:
        for number in range(2):
            process.wait_for(f'"router listening".*:{port}/{number}"')
        names = [f"of-{number}" for number in range(12)]
        for name in names:  # each over a connection of its own
            async with Client(f"127.0.0.1:{port}") as client:
                await client.complete("Once", max_tokens=1, request_id=name)
        async with httpx2.AsyncClient(
            base_url=f"http://127.0.0.1:{http_port}", timeout=WATCH_S, trust_env=False
        ) as http:
            # A process that does not answer the other one in a quarter of a second is left out.
            async with asyncio.timeout(WATCH_S):
                listed: list[str] = []
                while sorted(listed) != sorted(names):
                    answer = await http.get("/fleet/requests")
                    listed = [entry["request_id"] for entry in answer.json()["requests"]]
                for name in names:
                    while (found := await http.get(f"/fleet/requests/{name}")).status_code == 404:
                        pass
                    assert found.json()["request_id"] == name
    finally:
        process.stop()


def test_tiles_follow_a_worker_that_is_killed_and_returns_and_one_that_drains(pair: Cluster) -> None:
    killed, drained = pair.workers
    with ExitStack() as stack:
        views = stack.enter_context(watching(pair))
        until(views, killed, fleet_pb2.WORKER_STATE_READY)
        killed.process.popen.kill()
        until(views, killed, fleet_pb2.WORKER_STATE_CONNECTING)
        again = Worker(DEMO_MODEL, "--dtype=float32", "--kv-blocks=512", port=killed.port)
        stack.callback(again.stop)
        assert any(state_of(view, again) != fleet_pb2.WORKER_STATE_CONNECTING for view in views)
        stub: Any = FleetServiceStub(pair.channel)
        told = stub.DrainWorker(DrainWorkerRequest(worker=drained.address), timeout=60)
        assert told.state == fleet_pb2.WORKER_STATE_DRAINING
        until(views, drained, fleet_pb2.WORKER_STATE_DRAINING)
