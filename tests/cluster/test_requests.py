"""What clients can ask of a running cluster, and what they are told when they may not."""

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tests.cluster.processes import Cluster, wait_until
from trunkline import Client
from trunkline.client.client_requests import GenerateOptions
from trunkline.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    TrunklineError,
)
from trunkline.protocol import OLDEST_PROTOCOL, PROTOCOL_VERSION
from trunkline.v1 import fleet_pb2, inference_pb2, worker_pb2
from trunkline.v1.inference_pb2 import GenerateRequest, ListModelsRequest
from trunkline.v1.worker_pb2 import GetModelRequest

BOS = 0  # of the demo model
STORY = "Once upon a time there was a little fox who lived in the forest and loved to run in the tall grass."


async def test_text_tokens_and_chat_are_prompts(cluster: Cluster) -> None:
    async with Client(cluster.address) as client:
        text = await client.complete(STORY, max_tokens=12, temperature=0.0)
        ids = await client.tokenize(STORY)
        assert (await client.complete(ids, max_tokens=12, temperature=0.0)).text == text.text
        assert text.prompt.prompt_tokens == len(ids)
        assert text.prompt.model == "tiny-tales"
        assert text.prompt.worker_id in {worker.address for worker in cluster.workers}
        chat = await client.complete([("user", "Tell me a story about a fox.")], max_tokens=12)
        assert chat.choices[0].token_ids
        turn = [{"role": "user", "content": "Tell me a story about a fox."}]
        assert chat.prompt.prompt_tokens == len(await client.tokenize(turn))
        assert await client.detokenize(ids) == STORY


async def test_a_seed_repeats_and_is_reported(cluster: Cluster) -> None:
    async with Client(cluster.address) as client:
        # With 16 tokens one pair of choices in 12,000 was equal: most stories of this model begin in a few ways.
        first = await client.complete(STORY, max_tokens=64, temperature=1.0, n=3)
        assert len({choice.text for choice in first.choices}) == 3
        again = await client.complete(STORY, max_tokens=64, temperature=1.0, n=3, seed=first.prompt.seed)
        assert [choice.token_ids for choice in again.choices] == [choice.token_ids for choice in first.choices]
        assert first.usage.completion_tokens == sum(len(choice.token_ids) for choice in first.choices)


async def test_the_second_request_finds_the_prompt_cached(cluster: Cluster) -> None:
    prompt = "A story that nobody has told before, about a hedgehog with a red umbrella and a very small boat."
    async with Client(cluster.address) as client:
        cold = await client.complete(prompt, max_tokens=2)
        ids = await client.tokenize(prompt)
        wait_until(lambda: cluster.matched(ids)[cold.prompt.worker_id] >= 16, "the router has heard of its blocks")
        warm = await client.complete(prompt, max_tokens=2)
        assert cold.usage.cached_tokens == 0
        assert warm.usage.cached_tokens >= 16
        assert warm.prompt.worker_id == cold.prompt.worker_id


async def test_logprobs_stop_and_finish_reasons_arrive(cluster: Cluster) -> None:
    async with Client(cluster.address) as client:
        done = await client.complete(
            STORY, max_tokens=8, temperature=0.0, logprobs=3, prompt_logprobs=1, ignore_eos=True
        )
        choice = done.choices[0]
        assert [entry.chosen.token_id for entry in choice.logprobs] == choice.token_ids
        assert all(len(entry.top) == 3 for entry in choice.logprobs)
        assert len(done.prompt.logprobs) == done.prompt.prompt_tokens
        assert choice.finish_reason == "length"
        word = choice.text.split()[1]
        stopped = await client.complete(STORY, max_tokens=8, temperature=0.0, stop=[word], ignore_eos=True)
        assert stopped.choices[0].finish_reason == "stop"
        assert stopped.text == choice.text[: choice.text.index(word)]


async def test_fifty_streams_at_once_give_what_each_gives_alone(cluster: Cluster) -> None:
    async with Client(cluster.address) as client:
        prompts = [f"Number {n} said: {STORY}" for n in range(50)]  # nothing cached keeps them together
        alone = [(await client.complete(p, max_tokens=12, temperature=0.0)).text for p in prompts[:5]]
        together = await asyncio.gather(*(client.complete(p, max_tokens=12, temperature=0.0) for p in prompts))
        assert [done.text for done in together[:5]] == alone
        assert len({done.prompt.worker_id for done in together}) == 2, "load spreads"


BAD: list[tuple[str | list[int], GenerateOptions, type[TrunklineError], str]] = [
    ([], {}, InvalidRequest, "token_ids"),
    ([5, -1], {}, InvalidRequest, "token_ids"),
    ([5, 1 << 20], {}, InvalidRequest, "token_ids"),
    ("x", {"n": 1_000_000}, InvalidRequest, "n"),
    ("x", {"n": 0}, InvalidRequest, "n"),
    ("x", {"temperature": float("nan")}, InvalidRequest, "sampling.temperature"),
    ("x", {"model": "gpt-9"}, ModelNotFound, "model"),
    ([5] * 1024, {}, ContextLengthExceeded, "prompt"),
    ([5] * 1000, {"max_tokens": 100}, ContextLengthExceeded, "sampling.max_tokens"),
    ("x", {"request_id": "two words"}, InvalidRequest, "request_id"),
    ("x", {"stop_token_ids": [99999]}, InvalidRequest, "sampling.stop_token_ids"),
]


@pytest.mark.parametrize(("prompt", "options", "error", "field"), BAD)
async def test_bad_input_is_refused_by_name_and_disturbs_nobody(
    cluster: Cluster, prompt: str | list[int], options: GenerateOptions, error: type[TrunklineError], field: str
) -> None:
    async with Client(cluster.address) as client:
        running = asyncio.create_task(client.complete(STORY, max_tokens=40, temperature=0.0))
        with pytest.raises(error) as caught:
            await client.complete(prompt, **options)
        assert caught.value.field == field
        assert caught.value.reason
        assert len(str(caught.value).splitlines()) == 1
        assert (await running).choices[0].token_ids


async def test_an_empty_text_is_the_token_that_texts_begin_with(cluster: Cluster) -> None:
    async with Client(cluster.address) as client:
        empty = await client.complete("", max_tokens=4, temperature=0.0)
        first = await client.complete([BOS], max_tokens=4, temperature=0.0)
    assert empty.prompt.prompt_tokens == 1
    assert empty.choices[0].token_ids == first.choices[0].token_ids


async def test_no_prompt_at_all_is_refused(cluster: Cluster) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(cluster.stub.Generate(GenerateRequest()))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_client_that_goes_away_frees_its_blocks(cluster: Cluster) -> None:
    async with Client(cluster.address) as client:
        stream = client.generate(STORY, max_tokens=900, temperature=0.0, ignore_eos=True)
        async for _ in stream:
            break
        await stream.aclose()
    for worker in cluster.workers:
        wait_until(lambda worker=worker: worker.load().kv_live_blocks == 0, "no live blocks")  # type: ignore[misc]


async def test_a_deadline_that_passes_ends_the_request_and_frees_its_blocks(cluster: Cluster) -> None:
    async with Client(cluster.address) as client:
        with pytest.raises(DeadlineExceeded):
            await client.complete(STORY, max_tokens=900, temperature=0.0, ignore_eos=True, timeout_s=0.15)
    for worker in cluster.workers:
        wait_until(lambda worker=worker: worker.load().kv_live_blocks == 0, "no live blocks")  # type: ignore[misc]


def test_health_of_router_and_workers(cluster: Cluster) -> None:
    serving = health_pb2.HealthCheckResponse.SERVING
    router = health_pb2_grpc.HealthStub(cluster.channel)
    for service in ("", "liveness", "readiness", "trunkline.v1.InferenceService"):
        assert router.Check(health_pb2.HealthCheckRequest(service=service)).status == serving
    for service in ("", "liveness", "readiness", "trunkline.v1.WorkerService"):
        assert cluster.workers[0].health(service) == serving


@pytest.mark.parametrize("which", ["router", "worker"])
def test_reflection_describes_the_services(cluster: Cluster, which: str) -> None:
    channel = cluster.channel if which == "router" else cluster.workers[0].channel
    database = ProtoReflectionDescriptorDatabase(channel)
    service = "trunkline.v1.InferenceService" if which == "router" else "trunkline.v1.WorkerService"
    assert {service, "grpc.health.v1.Health"} <= set(database.get_services())
    file = database.FindFileContainingSymbol(service)
    assert "Generate" in {method.name for method in file.service[0].method}


def test_models_are_listed_with_their_limits(cluster: Cluster) -> None:
    (model,) = cluster.stub.ListModels(ListModelsRequest()).models
    assert (model.name, model.context_length, model.has_chat_template) == ("tiny-tales", 1024, True)
    description = cluster.workers[0].stub.GetModel(GetModelRequest())
    assert description.fingerprint
    assert description.kv_blocks == 512
    assert description.deterministic
    assert (description.protocol_version, description.min_router_protocol) == (PROTOCOL_VERSION, OLDEST_PROTOCOL)


@pytest.mark.parametrize("file", [inference_pb2, fleet_pb2, worker_pb2], ids=["inference", "fleet", "worker"])
def test_every_rpc_of_the_contract_is_served(cluster: Cluster, file: Any) -> None:
    """Walks the descriptors: an RPC that is added to the contract and forgotten in a server fails here."""
    channel = cluster.workers[1].channel if file is worker_pb2 else cluster.channel
    (service,) = file.DESCRIPTOR.services_by_name.values()
    assert len(service.methods) >= 2
    for method in service.methods:
        if method.name == "Drain":
            continue  # tests/cluster/test_bad_days.py: it would end the worker for everybody
        multi_callable: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(
            f"/{service.full_name}/{method.name}"
        )
        call = multi_callable(iter([b""]), timeout=2)
        try:
            next(call, None)
            code = grpc.StatusCode.OK
        except grpc.RpcError as error:
            code = error.code()
        finally:
            call.cancel()
        assert code not in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN), (
            method.name
        )
