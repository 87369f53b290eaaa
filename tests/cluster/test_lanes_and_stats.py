"""Lanes, bounds and statistics of a real worker, seen from outside."""

import asyncio
import json

import grpc
import pytest

from tests.cluster.processes import Cluster, Worker
from tests.worker.engine_rig import DEMO_MODEL
from trunkline import Client
from trunkline.v1.generation_pb2 import Lane, SamplingParams
from trunkline.v1.worker_pb2 import (
    GetModelRequest,
    GetStatsRequest,
    SessionHello,
    SessionRequest,
    SessionResponse,
    Submit,
    WorkerServiceGenerateRequest,
)


async def test_a_request_says_its_lane_and_is_told_which_it_ran_in(cluster: Cluster) -> None:
    async with Client(cluster.address, tenant="acme") as client:
        done = await client.complete("Once upon a time", max_tokens=4, lane="batch")
        assert done.prompt.lane == Lane.LANE_BATCH
        assert (await client.complete("Once upon a time", max_tokens=4)).prompt.lane == Lane.LANE_STANDARD
    worker = cluster.worker(done.prompt.worker_id)
    stats = worker.stub.GetStats(GetStatsRequest(), timeout=60)
    batch = stats.lanes[2]
    assert batch.lane == Lane.LANE_BATCH
    assert batch.accepted == batch.finished >= 1
    assert batch.ttft_s.count >= 1
    assert 0 < batch.ttft_s.p50 <= batch.e2e_s.p50 <= batch.e2e_s.p99
    assert any(tenant.tenant == "acme" and tenant.virtual_tokens > 0 for tenant in stats.tenants)
    assert stats.steps.steps > 0
    assert stats.steps.prefill_tokens + stats.steps.decode_tokens > 0
    assert stats.host_time_s.p50 > 0
    assert stats.device_time_s.p50 > stats.host_time_s.p50


def test_get_model_shows_the_budgets(cluster: Cluster) -> None:
    model = cluster.workers[0].stub.GetModel(GetModelRequest(), timeout=60)
    assert (model.max_step_tokens, model.max_running_requests, model.max_waiting_requests) == (2048, 256, 1024)
    assert model.max_waiting_tokens == 1 << 22
    assert (model.itl_target_ms, model.interactive_reserve, model.aging_s) == (100.0, 0.0, 60.0)
    assert (model.batching, model.admission) == ("continuous", "predicted")
    assert model.kv_memory_fraction == 0.0, "its size was given"


async def test_a_lane_that_is_none_is_refused_by_name(cluster: Cluster) -> None:
    async with Client(cluster.address) as client:
        with pytest.raises(ValueError, match="is not a lane"):
            await client.complete("Once", lane="express")
    submit = Submit(prompt_token_ids=[5], sampling=SamplingParams(seed=1), lane=9)  # type: ignore[arg-type]
    with pytest.raises(grpc.RpcError) as caught:
        list(cluster.workers[0].stub.Generate(WorkerServiceGenerateRequest(submit=submit), timeout=60))
    assert "lane: 9 is not a lane; allowed: LANE_INTERACTIVE" in (caught.value.details() or "")


def test_a_full_queue_refuses_at_once_disturbs_nobody_and_logs_its_statistics() -> None:
    worker = Worker(
        DEMO_MODEL, "--kv-blocks=256", "--max-running-requests=2", "--max-waiting-requests=3", "--price-per-hour=2.5",
        "--stats-interval-s=0.2",
    ).wait_ready()  # fmt: skip
    try:
        sampling = SamplingParams(seed=1, max_tokens=40, ignore_eos=True)
        submits = [Submit(handle=n, prompt_token_ids=[50 + n] * 20, sampling=sampling) for n in range(12)]
        requests = iter([SessionRequest(hello=SessionHello(router_id="r")), SessionRequest(submits=submits)])

        async def talk() -> tuple[dict[int, int], set[int]]:
            refused: dict[int, int] = {}
            finished: set[int] = set()
            async with grpc.aio.insecure_channel(worker.address) as channel:
                from trunkline.v1.worker_pb2_grpc import WorkerServiceStub

                call = WorkerServiceStub(channel).Session()
                for request in requests:
                    await call.write(request)
                while len(refused) + len(finished) < 12:
                    response = await asyncio.wait_for(call.read(), 60)
                    assert isinstance(response, SessionResponse)
                    for output in response.outputs:
                        if output.HasField("error"):
                            assert output.error.reason == "OVERLOADED"
                            refused[output.handle] = output.error.retry_delay_ms
                        elif output.chunk.finish_reason:
                            finished.add(output.handle)
                call.cancel()
            return refused, finished

        refused, finished = asyncio.run(talk())
        assert finished == {0, 1, 2}, "what fits the bound at once; all twelve came in one message"
        assert set(refused) == set(range(3, 12))
        assert all(delay > 0 for delay in refused.values())
        line = worker.process.wait_for("engine statistics")
        entry = json.loads(line) if line.startswith("{") else None
        if entry is not None:
            assert entry["steps"] > 0
        stats = worker.stub.GetStats(GetStatsRequest(), timeout=60)
        counts = stats.lanes[1]
        assert (counts.refused, counts.accepted, counts.finished) == (9, 3, 3)
        assert stats.output_tokens_per_s > 0
        expected = 2.5 / 3600 / stats.output_tokens_per_s * 1e6
        assert stats.cost_per_million_output_tokens == pytest.approx(expected)
        assert stats.load.waiting == stats.load.running == 0
    finally:
        worker.stop()


async def test_a_stop_string_counts_as_finished_and_a_full_front_queue_as_refused(cluster: Cluster) -> None:
    worker = cluster.workers[0]
    before = worker.stub.GetStats(GetStatsRequest(), timeout=60).lanes[1]
    sampling = SamplingParams(seed=1, temperature=0, max_tokens=60, stop=["."])
    for _ in range(3):
        submit = Submit(prompt_token_ids=[60, 61, 62], sampling=sampling)
        chunks = list(worker.stub.Generate(WorkerServiceGenerateRequest(submit=submit), timeout=60))
        assert chunks[-1].chunk.finish_reason
    after = worker.stub.GetStats(GetStatsRequest(), timeout=60).lanes[1]
    assert after.finished - before.finished == 3
    assert after.aborted == before.aborted
    assert after.e2e_s.count - before.e2e_s.count == 3


def test_many_who_ask_for_statistics_do_not_hold_up_the_engine(cluster: Cluster) -> None:
    worker = cluster.workers[0]

    async def ask() -> int:
        from trunkline.v1.worker_pb2_grpc import WorkerServiceStub

        answers = 0
        async with grpc.aio.insecure_channel(worker.address) as channel:
            stub = WorkerServiceStub(channel)
            submit = Submit(prompt_token_ids=[60], sampling=SamplingParams(seed=1, max_tokens=100, ignore_eos=True))
            stream = stub.Generate(WorkerServiceGenerateRequest(submit=submit), timeout=60)
            done = asyncio.ensure_future(_last(stream))

            async def keep_asking() -> None:
                nonlocal answers
                while not done.done():
                    await stub.GetStats(GetStatsRequest(), timeout=60)
                    answers += 1

            await asyncio.gather(done, *(keep_asking() for _ in range(16)))
        return answers

    # At most one question is under way at a time: each is answered between two steps, and there are a hundred steps.
    assert 16 <= asyncio.run(ask()) <= 16 * 400


async def _last(stream: grpc.aio.UnaryStreamCall) -> object:  # type: ignore[type-arg]
    return [response async for response in stream][-1]
