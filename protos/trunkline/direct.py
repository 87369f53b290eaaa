"""The direct path of the client: a router chooses and signs, the answer streams from the worker.

The call to the router lasts as long as the request, with two to four messages in all. Where a worker is lost the client
asks it for another one, with the ledger of what it has; the answer goes on there as if nothing had been. While nothing
is lost the router is not needed: an answer that has begun survives the router's end.
"""

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc

from trunkline.errors import NoWorker, TrunklineError, error_of
from trunkline.ledger import Ledger, OutOfOrder
from trunkline.status import FORBIDDEN, NO_WORKER, OVERLOADED
from trunkline.v1.generation_pb2 import RequestError
from trunkline.v1.inference_pb2 import (
    ChoiceLedger,
    DirectLost,
    DirectStarted,
    GenerateRequest,
    GenerateResponse,
    GrantRequest,
    GrantResponse,
    PromptInfo,
    Usage,
)
from trunkline.v1.worker_pb2 import Grant, Resume, WorkerServiceGenerateRequest, WorkerServiceGenerateResponse
from trunkline.v1.worker_pb2_grpc import WorkerServiceStub

MAX_MESSAGE_BYTES = 64 << 20
# A worker behind a link that is cut is noticed within the sum of these.
KEEPALIVE_MS, KEEPALIVE_TIMEOUT_MS = 10_000, 5_000
CONNECT_MS = 5_000
MAX_IDLE_CHANNELS = 64  # to workers that nothing runs at
MAX_WAITING = 64  # responses that wait for the reader; past it the worker is read no further
FAREWELL_S = 1.0  # for the router to hear that all is well

# What a call ends with where the stream broke, and nobody refused anything.
BROKEN = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
}

_log = logging.getLogger(__name__)

Metadata = Sequence[tuple[str, str]]


class NotOffered(Exception):
    """The router gives no grants, and nothing has been done for the request."""


class _Lost(Exception):
    """The worker gave the answer up; another one may go on. `refusal`: what it said, if anything; `granted`: where to
    go on, where that is known already."""

    def __init__(
        self, problem: str, refusal: RequestError | None = None, *, granted: GrantResponse | None = None
    ) -> None:
        super().__init__(problem)
        self.refusal = refusal
        self.granted = granted


class DirectPath:
    """Channels to workers, and the answers that come by them.

    inter_token_timeout_s: after so long without news of an answer the router is asked whether its worker is at work; so
    a request may wait in a queue for as long as it takes, and a worker that hangs is left.
    """

    def __init__(self, inter_token_timeout_s: float) -> None:
        self._inter_token_timeout_s = inter_token_timeout_s
        self._workers = _Workers()
        self._has_warned = False

    async def close(self) -> None:
        await self._workers.close()

    def warn(self, not_offered: NotOffered) -> None:
        """Says once that this client is not direct, although it should be."""
        if not self._has_warned:
            self._has_warned = True
            _log.warning("not direct, through the router: %s", not_offered)

    async def responses(
        self, router: Any, request: GenerateRequest, *, timeout_s: float | None, metadata: Metadata
    ) -> AsyncGenerator[GenerateResponse, None]:
        """The answer as the router would stream it. Raises TrunklineError, and NotOffered before anything else."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        router_call = _RouterCall(router.Grant(timeout=timeout_s, metadata=metadata))
        try:
            granted = await router_call.first(request)
            answer = _Answer(request.n if request.HasField("n") else 1)
            while not answer.is_complete:
                answer.begin(granted)
                attempt = self._attempt(router_call, granted, answer, deadline_s)
                try:
                    async with aclosing(attempt) as responses:
                        async for response in responses:
                            yield response
                except _Lost as lost:
                    granted = await router_call.lost(answer, lost)
                    if answer.has_output:
                        answer.resumptions += 1
        finally:
            router_call.cancel()

    async def _attempt(
        self, router_call: "_RouterCall", granted: GrantResponse, answer: "_Answer", deadline_s: float | None
    ) -> AsyncGenerator[GenerateResponse, None]:
        """What one worker says; returns when the answer is complete. Raises _Lost and TrunklineError."""
        async with (
            self._workers.at(granted.worker_address) as stub,
            _streams(stub, granted.grants, deadline_s) as arrived,
        ):
            has_started = False
            while not answer.is_complete:
                try:
                    async with asyncio.timeout(self._inter_token_timeout_s):
                        item = await arrived.get()
                except TimeoutError:
                    await router_call.silent(answer)
                    continue
                if isinstance(item, Exception):
                    raise item
                responses = answer.take(item)
                if not has_started:
                    has_started = True
                    await router_call.started()
                if answer.is_complete:
                    await router_call.end()
                for response in responses:
                    yield response
            await router_call.farewell()


class _Answer:
    """What has come of an answer, whichever worker it came from."""

    def __init__(self, choices: int) -> None:
        self._ledgers = [Ledger() for _ in range(choices)]
        self._waiting: list[WorkerServiceGenerateResponse] = []  # for the prompt, which is told first
        self._prompt = PromptInfo()
        self._request_id = ""
        self._prompt_known = self._prompt_sent = False
        self.resumptions = 0

    @property
    def is_complete(self) -> bool:
        return all(ledger.finished for ledger in self._ledgers)

    @property
    def has_output(self) -> bool:
        return self._prompt_known or any(ledger.num_tokens or ledger.finished for ledger in self._ledgers)

    def begin(self, granted: GrantResponse) -> None:
        """Another attempt begins."""
        self._request_id = granted.request_id
        if not self._prompt_known:
            self._prompt.CopyFrom(granted.prompt)

    def take(self, item: WorkerServiceGenerateResponse) -> list[GenerateResponse]:
        """What the caller hears, a chunk each; nothing where that has to wait. Raises _Lost where it does not follow
        what came."""
        chunk = item.chunk
        try:
            self._ledgers[chunk.index].add(chunk)
        except (OutOfOrder, IndexError) as error:
            raise _Lost(f"the worker lost its place: {error}") from None
        if chunk.index == 0 and not self._prompt_known:
            self._prompt_known = True
            self._prompt.cached_tokens = item.prompt.cached_tokens
            self._prompt.logprobs.extend(item.prompt.logprobs)
        self._waiting.append(item)
        if not self._prompt_known:
            return []
        responses = [GenerateResponse(request_id=self._request_id, chunks=[waiting.chunk]) for waiting in self._waiting]
        self._waiting = []
        if not self._prompt_sent:
            self._prompt_sent = True
            responses[0].prompt.CopyFrom(self._prompt)
        if self.is_complete:
            responses[-1].usage.CopyFrom(
                Usage(
                    prompt_tokens=self._prompt.prompt_tokens,
                    cached_tokens=self._prompt.cached_tokens,
                    completion_tokens=sum(ledger.num_tokens for ledger in self._ledgers),
                    resumptions=self.resumptions,
                )
            )
        return responses

    def claims(self, refusal: RequestError | None = None) -> DirectLost:
        """How far it has come, for the router."""
        ledgers = []
        for choice, ledger in enumerate(self._ledgers):
            if ledger.finished:
                ledgers.append(ChoiceLedger(choice=choice, finished=True))
            elif ledger.num_tokens or ledger.text_bytes:
                output = Resume(output_token_ids=ledger.tokens, text_bytes_sent=ledger.text_bytes)
                ledgers.append(ChoiceLedger(choice=choice, output=output))
        return DirectLost(ledgers=ledgers, prompt_known=self._prompt_known, refusal=refusal)


class _RouterCall:
    """One request's Grant call. While the worker streams, its trouble is no trouble."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._is_broken = False

    async def first(self, request: GenerateRequest) -> GrantResponse:
        """Raises NotOffered and TrunklineError."""
        try:
            return await self._ask(GrantRequest(request=request))
        except grpc.aio.AioRpcError as error:
            refused = error_of(error)
            if error.code() is grpc.StatusCode.UNIMPLEMENTED or refused.reason == FORBIDDEN:
                raise NotOffered(str(refused)) from None
            raise refused from None

    async def lost(self, answer: _Answer, lost: _Lost) -> GrantResponse:
        """Where to go on. Raises TrunklineError."""
        if lost.granted is not None:
            return lost.granted
        try:
            return await self._ask(GrantRequest(lost=answer.claims(lost.refusal)))
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from lost

    async def silent(self, answer: _Answer) -> None:
        """Asks what a silence means. Returns where it means nothing. Raises _Lost where another worker is to go on, and
        TrunklineError."""
        if self._is_broken:
            return
        try:
            granted = await self._ask(GrantRequest(silent=answer.claims()))
        except grpc.aio.AioRpcError as error:
            refused = error_of(error)
            if refused.reason:
                raise refused from None
            return
        if not granted.wait:
            raise _Lost("the worker hangs", granted=granted)

    async def started(self) -> None:
        await self._tell(GrantRequest(started=DirectStarted()))

    async def end(self) -> None:
        """All is there: the router settles."""
        if not self._is_broken:
            try:
                await self._call.done_writing()
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                self._is_broken = True

    async def farewell(self) -> None:
        """Waits a moment for the router to have settled: cancelling a call can overtake what it was told."""
        if not self._is_broken:
            with contextlib.suppress(grpc.aio.AioRpcError, TimeoutError):
                async with asyncio.timeout(FAREWELL_S):
                    await self._call.read()

    def cancel(self) -> None:
        self._call.cancel()

    async def _ask(self, request: GrantRequest) -> GrantResponse:
        """Raises AioRpcError."""
        await self._tell(request)
        granted = await self._call.read()
        if granted is grpc.aio.EOF:
            self._is_broken = True
            raise NoWorker("the router ended the call") from None
        answer: GrantResponse = granted
        return answer

    async def _tell(self, request: GrantRequest) -> None:
        """What the call ended with, reading tells."""
        if not self._is_broken:
            try:
                await self._call.write(request)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                self._is_broken = True


@asynccontextmanager
async def _streams(
    stub: Any, grants: Sequence[Grant], deadline_s: float | None
) -> "AsyncIterator[asyncio.Queue[WorkerServiceGenerateResponse | Exception]]":
    """What the choices' streams bring, in the order in which it comes; an exception where one of them broke."""
    left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
    arrived: asyncio.Queue[WorkerServiceGenerateResponse | Exception] = asyncio.Queue(MAX_WAITING)
    calls = [stub.Generate(WorkerServiceGenerateRequest(grant=grant), timeout=left_s) for grant in grants]
    readers = [asyncio.create_task(_read(call, arrived)) for call in calls]
    try:
        yield arrived
    finally:
        for call in calls:
            call.cancel()
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def _read(call: Any, arrived: "asyncio.Queue[WorkerServiceGenerateResponse | Exception]") -> None:
    problem: Exception = _Lost("the worker ended the stream before the answer")
    try:
        async for item in call:
            await arrived.put(item)
            if item.chunk.finish_reason:
                return
    except grpc.aio.AioRpcError as error:
        problem = _problem(error)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        problem = TrunklineError("the client was closed")  # and so was the channel
    await arrived.put(problem)


def _problem(error: grpc.aio.AioRpcError) -> TrunklineError | _Lost:
    """What a worker's refusal or a broken stream means."""
    refused = error_of(error)
    if refused.reason in (NO_WORKER, OVERLOADED, FORBIDDEN):  # FORBIDDEN: it was restarted, or the grant is too old
        retry_delay_ms = int((refused.retry_after_s or 0) * 1e3)
        return _Lost(str(refused), RequestError(reason=refused.reason, retry_delay_ms=retry_delay_ms))
    if not refused.reason and error.code() in BROKEN:
        return _Lost(str(refused))
    return refused


class _Connection:
    def __init__(self, address: str) -> None:
        self.channel = grpc.aio.insecure_channel(
            address,
            options=(
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
                ("grpc.keepalive_time_ms", KEEPALIVE_MS),
                ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.max_pings_without_data", 0),
                ("grpc.min_reconnect_backoff_ms", CONNECT_MS),
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.enable_retries", 0),
            ),
        )
        self.stub: Any = WorkerServiceStub(self.channel)
        self.users = 0


class _Workers:
    """Connections by address, the longest unused ones first."""

    def __init__(self) -> None:
        self._connections: OrderedDict[str, _Connection] = OrderedDict()

    @asynccontextmanager
    async def at(self, address: str) -> AsyncIterator[Any]:
        """A stub to the worker there."""
        connection = self._connections.pop(address, None) or _Connection(address)
        self._connections[address] = connection
        connection.users += 1
        try:
            yield connection.stub
        except _Lost as lost:
            # Nobody answered there. Who goes there next tries at once, and not after this connection's back-off.
            if lost.refusal is None and self._connections.get(address) is connection:
                del self._connections[address]
            raise
        finally:
            connection.users -= 1
            if self._connections.get(address) is not connection and not connection.users:
                await connection.channel.close()
            await self._trim()

    async def close(self) -> None:
        connections, self._connections = self._connections, OrderedDict()
        await asyncio.gather(*(connection.channel.close() for connection in connections.values()))

    async def _trim(self) -> None:
        idle = [address for address, connection in self._connections.items() if not connection.users]
        gone = [self._connections.pop(address) for address in idle[: max(0, len(idle) - MAX_IDLE_CHANNELS)]]
        await asyncio.gather(*(connection.channel.close() for connection in gone))
