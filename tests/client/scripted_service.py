"""A real server whose answers are a list, and both clients behind one face."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tests.runtime.unimplemented_service import UnimplementedService
from trunkline import Client, SyncClient
from trunkline.client.completion import Completion
from trunkline.status import RequestRefused
from trunkline.v1.generation_pb2 import FinishReason, OutputChunk
from trunkline.v1.inference_pb2 import GenerateResponse, ListModelsResponse, Model
from trunkline.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from trunkline_runtime.server import GrpcServer

SERVICE = "trunkline.v1.InferenceService"


@dataclass(frozen=True)
class Asked:
    """A call that arrived."""

    request_id: str
    metadata: dict[str, str]
    at_s: float


@dataclass
class ScriptedService(UnimplementedService):
    """Refuses its first calls with `refusals`, one each, and answers the others with `texts` and then, if `endless`,
    waits until the call is cancelled. `late_refusal` follows the texts."""

    refusals: Sequence[RequestRefused] = ()
    texts: Sequence[str] = ("a", "b")
    late_refusal: RequestRefused | None = None
    endless: bool = False
    asked: list[Asked] = field(default_factory=list)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    port: int = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[GenerateResponse]:
        self._arrived(request.request_id, context)
        try:
            for text in self.texts:
                yield GenerateResponse(request_id=request.request_id, chunks=[OutputChunk(text=text)])
            if self.late_refusal is not None:
                raise self.late_refusal
            if self.endless:
                await asyncio.Event().wait()
            finish = FinishReason.FINISH_REASON_LENGTH
            yield GenerateResponse(request_id=request.request_id, chunks=[OutputChunk(finish_reason=finish)])
        except (asyncio.CancelledError, GeneratorExit):
            # GeneratorExit: the call was cancelled before the server asked for the next message.
            self.cancelled.set()
            raise

    async def ListModels(self, request: Any, context: Any) -> ListModelsResponse:
        self._arrived("", context)
        return ListModelsResponse(models=[Model(name="m")])

    def _arrived(self, request_id: str, context: Any) -> None:
        metadata = {name: str(value) for name, value in context.invocation_metadata()}
        self.asked.append(Asked(request_id, metadata, time.monotonic()))
        if len(self.asked) <= len(self.refusals):
            raise self.refusals[len(self.asked) - 1]


@asynccontextmanager
async def serving(service: ScriptedService, port: int = 0) -> AsyncIterator[GrpcServer]:
    server = GrpcServer("127.0.0.1", port, services=[SERVICE])
    add_InferenceServiceServicer_to_server(service, server.grpc)
    await server.start()
    await server.set_ready(True)
    service.port = server.port
    try:
        yield server
    finally:
        await server.stop(0)


class Kind(StrEnum):
    """Which client."""

    ASYNC = "async"
    SYNC = "sync"


async def complete(
    kind: Kind,
    address: str,
    *,
    timeout_s: float | None = 20.0,
    default_timeout_s: float | None = None,
    **options: Any,
) -> Completion:
    """One answer, from a client with these options.  default_timeout_s: the client's own"""
    options["timeout_s"] = default_timeout_s
    if kind is Kind.ASYNC:
        async with Client(address, **options) as client:
            return await client.complete("x", timeout_s=timeout_s)
    return await asyncio.to_thread(_complete, address, timeout_s, options)


def _complete(address: str, timeout_s: float | None, options: dict[str, Any]) -> Completion:
    with SyncClient(address, **options) as client:
        return client.complete("x", timeout_s=timeout_s)


async def model_names(kind: Kind, address: str, **options: Any) -> list[str]:
    """A call with one response."""
    if kind is Kind.ASYNC:
        async with Client(address, **options) as client:
            return [model.name for model in await client.list_models()]
    return await asyncio.to_thread(_model_names, address, options)


def _model_names(address: str, options: dict[str, Any]) -> list[str]:
    with SyncClient(address, **options) as client:
        return [model.name for model in client.list_models()]
