"""The calls to a connected worker that are not part of its session."""

from typing import TYPE_CHECKING

from google.protobuf.duration_pb2 import Duration

from trunkline.v1.worker_pb2 import (
    DrainRequest,
    DrainResponse,
    GetModelResponse,
    GetStatsRequest,
    GetStatsResponse,
    UndrainRequest,
)
from trunkline_router.workers.link_context import LinkContext

if TYPE_CHECKING:
    from trunkline.v1.worker_pb2_grpc import WorkerServiceAsyncStub  # exists in the stub file only


class WorkerCalls:
    """Each call proves to the worker that a router makes it. They raise grpc.aio.AioRpcError."""

    def __init__(self, stub: "WorkerServiceAsyncStub", context: LinkContext, model: GetModelResponse) -> None:
        self._stub = stub
        self._context = context
        self._model = model

    async def stats(self, timeout_s: float) -> GetStatsResponse:
        """Returns the engine's statistics. It answers between two steps."""
        proof = self._context.proof("GetStats", self._model)
        return await self._stub.GetStats(GetStatsRequest(), timeout=timeout_s, metadata=proof)

    async def drain(self, timeout_s: float | None) -> DrainResponse:
        """Drains the worker; returns when none of its requests is left. If this is cancelled, the drain goes on.

        timeout_s: for running requests to finish; None: the worker's own setting
        """
        request = DrainRequest()
        if timeout_s is not None:
            request.timeout.CopyFrom(Duration(seconds=int(timeout_s), nanos=int(timeout_s % 1 * 1e9)))
        return await self._stub.Drain(request, metadata=self._context.proof("Drain", self._model))

    async def undrain(self, timeout_s: float) -> None:
        """Ends the worker's drain."""
        proof = self._context.proof("Undrain", self._model)
        await self._stub.Undrain(UndrainRequest(), timeout=timeout_s, metadata=proof)
