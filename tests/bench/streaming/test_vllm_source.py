"""The source for gateways answers their calls as vLLM's gRPC server does."""

import asyncio
import os
from collections.abc import AsyncIterator

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from trunkline_bench.streaming.client import Load
from trunkline_bench.streaming.letters import EARLY_S, LETTERS, age_s
from trunkline_bench.streaming.processes import Hop, run
from trunkline_bench.streaming.vllm_source import VllmSource

STEPS_PER_S = 100.0


@pytest.fixture
async def address() -> AsyncIterator[str]:
    server = grpc.aio.server()
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(VllmSource(STEPS_PER_S), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(0)


async def test_the_source_answers_what_a_gateway_asks_of_a_new_worker(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        worker = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        assert (await worker.HealthCheck(vllm_engine_pb2.HealthCheckRequest())).healthy
        model = await worker.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest())
        assert model.served_model_name
        assert model.is_generation
        server = await worker.GetServerInfo(vllm_engine_pb2.GetServerInfoRequest())
        assert server.server_type == "vllm-grpc"


async def test_a_subscription_to_cache_events_is_answered_though_there_are_none(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        worker = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        events = worker.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
        await asyncio.wait_for(events.initial_metadata(), 60)
        events.cancel()


async def test_a_stream_has_a_message_per_token_and_a_final_summary(address: str) -> None:
    request = vllm_engine_pb2.GenerateRequest(
        tokenized=vllm_engine_pb2.TokenizedInput(input_ids=[7, 8, 9]),
        sampling_params=vllm_engine_pb2.SamplingParams(max_tokens=4),
        stream=True,
    )
    async with grpc.aio.insecure_channel(address) as channel:
        worker = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        *chunks, last = [response async for response in worker.Generate(request)]
    assert [len(response.chunk.token_ids) for response in chunks] == [1, 1, 1, 1]
    assert [response.chunk.completion_tokens for response in chunks] == [1, 2, 3, 4]
    complete = last.complete
    assert list(complete.output_ids) == [response.chunk.token_ids[0] for response in chunks]
    assert (complete.prompt_tokens, complete.completion_tokens, complete.finish_reason) == (3, 4, "length")


async def test_a_reader_can_compute_the_age_of_each_token(address: str) -> None:
    load = Load(address, "vllm", streams=2, max_tokens=10, steps_per_s=STEPS_PER_S)
    seen = (await run(Hop(address, "vllm", os.getpid()), load)).seen
    assert (seen.tokens, seen.messages) == (20, 22)
    assert -1e3 * EARLY_S <= seen.age_p50_ms <= seen.age_p99_ms < 1e3 * len(LETTERS) / STEPS_PER_S


def test_a_letter_identifies_its_step_until_the_letter_is_used_again() -> None:
    for step in range(1000, 1000 + len(LETTERS)):
        letter = LETTERS[step % len(LETTERS)]
        for late_s in (-EARLY_S / 2, 0.001, 0.05, 2.5):
            assert age_s(letter, step / 20 + late_s, 20) == pytest.approx(late_s, abs=1e-9)
