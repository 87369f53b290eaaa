"""An InferenceService that answers no call: tests override what they need."""

from collections.abc import AsyncIterator
from typing import Any

import grpc

from trunkline.v1.inference_pb2 import (
    DetokenizeResponse,
    EmbedResponse,
    GenerateResponse,
    GrantResponse,
    ListModelsResponse,
    ScoreResponse,
    TokenizeResponse,
)
from trunkline.v1.inference_pb2_grpc import InferenceServiceServicer

Context = grpc.aio.ServicerContext[Any, Any]


class UnimplementedService(InferenceServiceServicer):
    """Each call ends with UNIMPLEMENTED."""

    async def Generate(self, request: Any, context: Context) -> AsyncIterator[GenerateResponse]:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED)
        yield GenerateResponse()

    async def Grant(self, request_iterator: Any, context: Context) -> AsyncIterator[GrantResponse]:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED)
        yield GrantResponse()

    async def Embed(self, request: Any, context: Context) -> AsyncIterator[EmbedResponse]:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED)
        yield EmbedResponse()

    async def Score(self, request: Any, context: Context) -> AsyncIterator[ScoreResponse]:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED)
        yield ScoreResponse()

    async def Tokenize(self, request: Any, context: Context) -> TokenizeResponse:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED)

    async def Detokenize(self, request: Any, context: Context) -> DetokenizeResponse:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED)

    async def ListModels(self, request: Any, context: Context) -> ListModelsResponse:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED)
