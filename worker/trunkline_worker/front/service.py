"""WorkerService: the worker's RPCs, each a thin layer over the front."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from trunkline.capabilities import TIERS, unable
from trunkline.status import RequestRefused, deadline_exceeded, invalid
from trunkline.v1.worker_pb2 import (
    DrainRequest,
    DrainResponse,
    GetModelRequest,
    GetModelResponse,
    GetStatsRequest,
    GetStatsResponse,
    GetTokenizerRequest,
    GetTokenizerResponse,
    SessionResponse,
    Submit,
    UndrainRequest,
    UndrainResponse,
    WatchCacheRequest,
    WatchCacheResponse,
    WorkerServiceGenerateRequest,
    WorkerServiceGenerateResponse,
)
from trunkline.v1.worker_pb2_grpc import WorkerServiceServicer, add_WorkerServiceServicer_to_server
from trunkline_runtime.log import get_logger
from trunkline_runtime.telemetry.trace_context import trace_context_of
from trunkline_worker.front.choice import Choice
from trunkline_worker.front.draining import Draining
from trunkline_worker.front.front import Front
from trunkline_worker.front.grants import FollowedGrant, GrantDesk, GrantReports
from trunkline_worker.front.session import Backlog, Outbox, Session
from trunkline_worker.front.text.tokenizer_files import TokenizerFiles

# Small, so that a call whose caller stops reading holds little memory.
TOKENIZER_CHUNK_BYTES = 128 << 10
SEND_TOKENIZER_S = 60.0  # routers wait for 10 s

SERVICE = "trunkline.v1.WorkerService"
Context = grpc.aio.ServicerContext[Any, Any]


class WorkerService(WorkerServiceServicer):
    """The RPCs of a worker.

    Door checks callers and bounds their calls before they get here.
    """

    def __init__(
        self,
        front: Front,
        files: TokenizerFiles,
        draining: Draining,
        desk: GrantDesk,
    ) -> None:
        self._front = front
        self._files = files
        self._desk = desk
        self.backlog = Backlog()
        self._reports = GrantReports()
        self._draining = draining

    async def Session(self, request_iterator: Any, context: Context) -> AsyncIterator[SessionResponse]:
        """Serves a router's stream. The requests arrive as bytes: see add_to_server()."""
        task = asyncio.current_task()
        assert task is not None
        # Cancelled on a stall, because writing to a stalled router would block forever.
        session = Session(self._front, task.cancel, self.backlog)
        log = get_logger()

        async def read() -> None:
            try:
                async for raw in request_iterator:
                    await session.take(raw)
            except RequestRefused as refused:
                log.error("session ended: invalid message from the router", problem=refused.message)
                session.refuse(refused)
                return
            except Exception as error:
                if not isinstance(error, grpc.aio.UsageError):
                    log.error("session ended by an unexpected error", exc_info=error)
            task.cancel()  # the router has disconnected or closed its side

        reading = asyncio.create_task(read())
        try:
            with self._reports.session(session.tell) as number:
                async for response in session.responses(number):
                    yield response
        finally:
            reading.cancel()
            session.close()
            log.info("session closed")

    async def Generate(
        self, request: WorkerServiceGenerateRequest, context: Context
    ) -> AsyncIterator[WorkerServiceGenerateResponse]:
        submit = self._desk.take(request)
        if not request.HasField("grant"):
            submit.traceparent, submit.tracestate = trace_context_of(context.invocation_metadata())
            submit.ClearField("timeout")
            submit.ClearField("report_session")
        with self._reports.follow(submit) as followed:
            remaining_s = context.time_remaining()
            if remaining_s is not None:
                if remaining_s <= 0:
                    raise deadline_exceeded()
                remaining_ns = int(remaining_s * 1e9)
                if not submit.HasField("timeout") or remaining_ns < submit.timeout.ToNanoseconds():
                    submit.timeout.FromNanoseconds(remaining_ns)
            async with aclosing(self._responses(submit, followed)) as responses:
                async for response in responses:
                    yield response

    async def _responses(
        self, submit: Submit, followed: FollowedGrant
    ) -> AsyncGenerator[WorkerServiceGenerateResponse, None]:
        choice: Choice | None = None

        def give_up() -> None:
            if choice is not None:
                self._front.cancel(choice)

        outbox = Outbox(give_up, self.backlog)
        choice = self._front.submit(submit, outbox.put)
        if choice is not None:
            followed.began(choice)
        try:
            while True:
                for output in await outbox.take():
                    if output.HasField("error"):
                        raise RequestRefused.from_proto(output.error)
                    prompt = output.prompt if output.HasField("prompt") else None
                    response = WorkerServiceGenerateResponse(chunk=output.chunk, prompt=prompt)
                    if output.HasField("vector"):
                        response.vector.CopyFrom(output.vector)
                    elif output.HasField("score"):
                        response.score.CopyFrom(output.score)
                    yield response
                    if response.chunk.finish_reason or not response.HasField("chunk"):
                        return
        finally:
            outbox.close()
            if choice is not None:
                self._front.cancel(choice)

    async def WatchCache(self, request: WatchCacheRequest, context: Context) -> AsyncIterator[WatchCacheResponse]:
        if request.tiers and not self._front.capabilities.can(TIERS):
            raise unable(TIERS, "this worker does not have")
        subscription = self._front.mirror.subscribe(request.stride)
        try:
            async for item in subscription.items():
                yield item
        finally:
            self._front.mirror.unsubscribe(subscription)

    async def GetModel(self, request: GetModelRequest, context: Context) -> GetModelResponse:
        return self._front.model

    async def GetTokenizer(self, request: GetTokenizerRequest, context: Context) -> AsyncIterator[GetTokenizerResponse]:
        task = asyncio.current_task()
        assert task is not None
        # Cancelled, because ending the call with a status would wait for a client that does not read.
        given_up = asyncio.get_running_loop().call_later(SEND_TOKENIZER_S, task.cancel)
        try:
            for name, data in self._files.contents.items():
                for start in range(0, max(1, len(data)), TOKENIZER_CHUNK_BYTES):
                    yield GetTokenizerResponse(name=name, data=data[start : start + TOKENIZER_CHUNK_BYTES])
        finally:
            given_up.cancel()

    async def GetStats(self, request: GetStatsRequest, context: Context) -> GetStatsResponse:
        return await self._front.stats()

    async def Drain(self, request: DrainRequest, context: Context) -> DrainResponse:
        timeout_s = request.timeout.ToNanoseconds() / 1e9 if request.HasField("timeout") else None
        if timeout_s is not None and timeout_s < 0:
            raise invalid("timeout", f"{timeout_s} s is negative")
        # A caller that disconnects does not stop a drain that has begun.
        return await asyncio.shield(asyncio.ensure_future(self._draining.drain(timeout_s)))

    async def Undrain(self, request: UndrainRequest, context: Context) -> UndrainResponse:
        await self._draining.undrain()
        return UndrainResponse()


def add_to_server(service: WorkerService, server: grpc.aio.Server) -> None:
    """Registers every method. Session's messages are delivered as bytes, because they are parsed piece by piece."""
    session = grpc.stream_stream_rpc_method_handler(
        service.Session, request_deserializer=bytes, response_serializer=SessionResponse.SerializeToString
    )
    # The first handler that knows a method serves it.
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Session": session}),))
    add_WorkerServiceServicer_to_server(service, server)
