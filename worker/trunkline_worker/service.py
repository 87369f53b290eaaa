"""WorkerService: the RPCs, each a few lines over the front."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc

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
    SessionRequest,
    SessionResponse,
    Submit,
    WatchCacheRequest,
    WatchCacheResponse,
    WorkerServiceGenerateRequest,
    WorkerServiceGenerateResponse,
)
from trunkline.v1.worker_pb2_grpc import WorkerServiceServicer
from trunkline_runtime.log import get_logger
from trunkline_runtime.tracing import trace_context_of
from trunkline_worker.front import Choice, Front
from trunkline_worker.gate import Gate
from trunkline_worker.grant_desk import GrantDesk
from trunkline_worker.grant_reports import FollowedGrant, GrantReports
from trunkline_worker.session import Outbox, Session
from trunkline_worker.tokenizer_files import TokenizerFiles

TOKENIZER_CHUNK_BYTES = 1 << 20

Context = grpc.aio.ServicerContext[Any, Any]


class WorkerService(WorkerServiceServicer):
    """`drain` is called with a time in seconds, or None for the worker's own setting.

    GetModel and GetTokenizer are open to everybody, and Generate to whoever has a grant; `gate` keeps the others.
    """

    def __init__(
        self,
        front: Front,
        files: TokenizerFiles,
        drain: Callable[[float | None], Awaitable[DrainResponse]],
        desk: GrantDesk,
        gate: Gate,
    ) -> None:
        self._front = front
        self._files = files
        self._desk = desk
        self._gate = gate
        self._reports = GrantReports()
        self._drain = drain

    async def Session(
        self, request_iterator: AsyncIterator[SessionRequest], context: Context
    ) -> AsyncIterator[SessionResponse]:
        self._gate.check("Session", context.invocation_metadata())
        task = asyncio.current_task()
        assert task is not None
        # Writing to a router that stands still would wait for ever.
        session = Session(self._front, on_stalled=task.cancel)
        log = get_logger()

        async def read() -> None:
            try:
                async for request in request_iterator:
                    if request.HasField("hello"):
                        log.info("session opened", router=request.hello.router_id)
                    await session.take(request)
            except Exception as error:
                if not isinstance(error, grpc.aio.UsageError):
                    log.error("session ends by an unexpected error", exc_info=error)
            finally:
                task.cancel()  # the router is gone, or has nothing more to say

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

        outbox = Outbox(give_up)
        choice = self._front.submit(submit, outbox.put)
        if choice is not None:
            followed.began(choice)
        try:
            while True:
                for output in await outbox.take():
                    if output.HasField("error"):
                        raise RequestRefused.from_proto(output.error)
                    prompt = output.prompt if output.HasField("prompt") else None
                    yield WorkerServiceGenerateResponse(chunk=output.chunk, prompt=prompt)
                    if output.chunk.finish_reason:
                        return
        finally:
            if choice is not None:
                self._front.cancel(choice)

    async def WatchCache(self, request: WatchCacheRequest, context: Context) -> AsyncIterator[WatchCacheResponse]:
        self._gate.check("WatchCache", context.invocation_metadata())
        subscription = self._front.mirror.subscribe(request.stride)
        try:
            async for item in subscription.items():
                yield item
        finally:
            self._front.mirror.unsubscribe(subscription)

    async def GetModel(self, request: GetModelRequest, context: Context) -> GetModelResponse:
        return self._front.model

    async def GetTokenizer(self, request: GetTokenizerRequest, context: Context) -> AsyncIterator[GetTokenizerResponse]:
        for name, data in self._files.contents.items():
            for start in range(0, max(1, len(data)), TOKENIZER_CHUNK_BYTES):
                yield GetTokenizerResponse(name=name, data=data[start : start + TOKENIZER_CHUNK_BYTES])

    async def GetStats(self, request: GetStatsRequest, context: Context) -> GetStatsResponse:
        self._gate.check("GetStats", context.invocation_metadata())
        return await self._front.stats()

    async def Drain(self, request: DrainRequest, context: Context) -> DrainResponse:
        self._gate.check("Drain", context.invocation_metadata())
        timeout_s = request.timeout.ToNanoseconds() / 1e9 if request.HasField("timeout") else None
        if timeout_s is not None and timeout_s < 0:
            raise invalid("timeout", f"{timeout_s} s is negative")
        # A caller that hangs up does not stop a drain that has begun.
        return await asyncio.shield(asyncio.ensure_future(self._drain(timeout_s)))
