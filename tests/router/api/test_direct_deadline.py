"""A direct client's deadline, where its router grants nothing and the answer comes through it."""

import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.router.cluster import SERVICE
from tests.runtime.unimplemented_service import UnimplementedService
from trunkline import Client
from trunkline.errors import DeadlineExceeded
from trunkline.status import forbidden
from trunkline.v1.generation_pb2 import FinishReason, OutputChunk
from trunkline.v1.inference_pb2 import GenerateResponse
from trunkline.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from trunkline_runtime.server import GrpcServer

TIMEOUT_S = 100.0


class GrantsNothing(UnimplementedService):
    """A router that says so only after `takes_s`, on a clock that it moves."""

    def __init__(self, takes_s: float) -> None:
        self._takes_s = takes_s
        self._ahead_s = 0.0
        self.left_s: list[float | None] = []  # of Generate calls

    def monotonic(self) -> float:
        return time.monotonic() + self._ahead_s

    async def Grant(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        async for _ in request_iterator:
            self._ahead_s += self._takes_s
            raise forbidden("too long to be granted")
        yield

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[GenerateResponse]:
        self.left_s.append(context.time_remaining())
        yield GenerateResponse(chunks=[OutputChunk(finish_reason=FinishReason.FINISH_REASON_STOP)])


@pytest.mark.parametrize(("takes_s", "left_s"), [(0.0, TIMEOUT_S), (70.0, 30.0), (101.0, None)])
async def test_the_time_that_asking_for_a_grant_has_taken_is_not_given_again(
    takes_s: float, left_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = GrantsNothing(takes_s)
    monkeypatch.setattr("trunkline.client.client.time", SimpleNamespace(monotonic=router.monotonic))
    monkeypatch.setattr("trunkline.client.worker_streams.time", SimpleNamespace(monotonic=router.monotonic))
    server = GrpcServer("127.0.0.1", 0, services=[SERVICE])
    add_InferenceServiceServicer_to_server(router, server.grpc)
    await server.start()
    try:
        async with Client(f"127.0.0.1:{server.port}", direct=True) as client:
            if left_s is None:
                with pytest.raises(DeadlineExceeded):
                    await client.complete("x", timeout_s=TIMEOUT_S)
                assert not router.left_s
            else:
                await client.complete("x", timeout_s=TIMEOUT_S)
                assert router.left_s == [pytest.approx(left_s, abs=5.0)]
            await client.complete("x", timeout_s=None)
            assert router.left_s[-1] is None
    finally:
        await server.stop(0)
