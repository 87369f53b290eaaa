"""What a request leaves is freed when it ends, not when Python's collector comes by."""

import gc
from collections import Counter
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest

from tests.router.cluster import cluster, refusal
from tests.router.direct_rig import KEY, direct, fakes
from tests.router.fake_worker import FakeWorker
from trunkline.v1.inference_pb2 import TokenizeRequest

PROMPT = list(range(5, 25))
REQUESTS = 20


class Garbage:
    """What only the collector finds of things that happen in a `with` block."""

    def __enter__(self) -> "Garbage":
        gc.collect()
        gc.disable()
        return self

    def __exit__(self, *_: object) -> None:
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            gc.collect()
            found: list[Any] = list(gc.garbage)
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
        names = Counter(f"{type(each).__module__}.{type(each).__name__}" for each in found)
        self.ours = {name: count for name, count in names.items() if name.startswith("trunkline")}
        self.calls = names["grpc._cython.cygrpc.RPCState"]  # with all that gRPC's core keeps of one


async def test_an_answer_leaves_nothing() -> None:
    worker = FakeWorker("a")
    async with cluster(worker) as router:
        await router.answer(PROMPT)
        with Garbage() as garbage:
            for _ in range(REQUESTS):
                await router.answer(PROMPT)
    assert not garbage.ours
    assert not garbage.calls


async def test_a_cancelled_request_leaves_nothing() -> None:
    worker = FakeWorker("a", answer=None)
    async with cluster(worker) as router:
        with Garbage() as garbage:
            for _ in range(REQUESTS):
                refused = await refusal(router.generate(PROMPT, timeout_s=0.05))
                assert refused.code == grpc.StatusCode.DEADLINE_EXCEEDED
    assert not garbage.ours
    assert not garbage.calls


@pytest.mark.parametrize("prompt", [[], [10**6]])
async def test_a_refused_request_leaves_nothing(prompt: list[int]) -> None:
    async with cluster(FakeWorker("a")) as router:
        await router.answer(PROMPT)
        with Garbage() as garbage:
            for _ in range(REQUESTS):
                refused = await refusal(router.generate(prompt))
                assert refused.code == grpc.StatusCode.INVALID_ARGUMENT
    assert not garbage.ours
    assert not garbage.calls


@pytest.mark.parametrize("method", ["/trunkline.v1.InferenceService/Tokenize", "/grpc.health.v1.Health/Check"])
async def test_a_refused_call_with_one_answer_leaves_nothing(method: str) -> None:
    request, code = TokenizeRequest().SerializeToString(), grpc.StatusCode.INVALID_ARGUMENT
    if "Health" in method:
        request, code = HealthCheckRequest(service="none").SerializeToString(), grpc.StatusCode.NOT_FOUND
    async with (
        cluster(FakeWorker("a")) as router,
        grpc.aio.insecure_channel(f"127.0.0.1:{router.port}") as channel,
    ):
        call: Any = channel.unary_unary(method)
        with Garbage() as garbage:
            for _ in range(REQUESTS):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call(request)
                assert refused.value.code() is code
    assert not garbage.ours
    assert not garbage.calls


async def test_a_granted_request_leaves_nothing_with_the_router() -> None:
    (worker,) = fakes("a", answer=1)
    async with cluster(worker, grant_key=KEY) as router, direct(router) as client:
        await client.complete(PROMPT)
        with Garbage() as garbage:
            for _ in range(REQUESTS):
                await client.complete(PROMPT)
    assert not {name: count for name, count in garbage.ours.items() if name.startswith("trunkline_router")}
