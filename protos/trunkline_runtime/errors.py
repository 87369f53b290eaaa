"""Translates exceptions to gRPC statuses with google.rpc details in one place: a server interceptor."""

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import grpc
from google.protobuf.any_pb2 import Any as AnyProto
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, QuotaFailure, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_status.rpc_status import to_status

from trunkline.status import (
    CODE_INVALID_ARGUMENT,
    ERROR_DOMAIN,
    INVALID_REQUEST,
    RequestRefused,
    internal,
    invalid,
)
from trunkline_runtime.log import get_logger
from trunkline_runtime.telemetry.trace_context import new_request_id

# A status is sent in trailing metadata, which is limited to 8 KiB; a message may quote a client's input.
MAX_MESSAGE_CHARACTERS = 400
STEP_BYTES = 256 << 10  # parsing this many bytes takes a fraction of a millisecond


def rich_status(refused: RequestRefused) -> Status:
    """A google.rpc.Status with ErrorInfo, and with BadRequest, QuotaFailure and RetryInfo if they apply."""
    message = refused.message
    if len(message) > MAX_MESSAGE_CHARACTERS:
        message = message[:MAX_MESSAGE_CHARACTERS] + "…"
    details: list[Message] = [ErrorInfo(reason=refused.reason, domain=ERROR_DOMAIN)]
    if refused.field:
        violation = BadRequest.FieldViolation(field=refused.field, description=message)
        details.append(BadRequest(field_violations=[violation]))
    if refused.quota:
        details.append(QuotaFailure(violations=[QuotaFailure.Violation(subject=refused.quota, description=message)]))
    if refused.retry_delay_ms:
        delay = Duration()
        delay.FromMilliseconds(refused.retry_delay_ms)
        details.append(RetryInfo(retry_delay=delay))
    return Status(code=refused.code, message=message, details=[_pack(detail) for detail in details])


def _pack(detail: Message) -> AnyProto:
    packed = AnyProto()
    packed.Pack(detail)
    return packed


Context = grpc.aio.ServicerContext[Any, Any]
Behaviour = Callable[[Any, Context], Any]


async def abort_with(context: Context, refused: RequestRefused) -> NoReturn:
    """Ends the RPC with the refusal's status."""
    status = to_status(rich_status(refused))
    await context.abort(status.code, status.details or "", status.trailing_metadata or ())
    raise AssertionError("abort() does not return")


class Passage(Protocol):
    """One call that passes a gate."""

    async def read(self, context: Context) -> Any:
        """The bytes of the call's next message; grpc.aio.EOF if there are no more. Raises RequestRefused if the message
        must not be parsed."""

    def answer_begins(self) -> None:
        """Called before the first response is written."""

    def leave(self) -> None:
        """Called when the call has ended."""


class RequestGate(Protocol):
    """A gate that calls pass before their requests are parsed."""

    def enter(self, method: str, context: Context) -> Passage:
        """Admits a call, no message of which was read yet, or raises RequestRefused.  method: its full name

        A gate may end the call later by cancelling the call's task with a RequestRefused as the message.
        """


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Ends calls that raise RequestRefused with its status; logs any other exception, and ends the call with INTERNAL.

    Each call is registered with grpc as streaming its request. So the interceptor reads and parses the request when
    there is room for it, and refuses one that cannot be parsed like any other invalid request. A behaviour may return
    or yield the serialized response instead of the message.

    gate: passed by calls before their requests are parsed; None: no gate
    """

    def __init__(self, gate: RequestGate | None = None) -> None:
        self._gate = gate
        self._made: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}  # by method

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        method = handler_call_details.method
        made = self._made.get(method)
        if made is None:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None  # unimplemented: grpc itself answers
            made = self._made[method] = self._handler(method, handler)
        return made

    def _handler(self, method: str, handler: Any) -> "grpc.RpcMethodHandler[Any, Any]":
        kind = ("stream" if handler.request_streaming else "unary") + (
            "_stream" if handler.response_streaming else "_unary"
        )
        behaviour = getattr(handler, kind)
        writes_itself = inspect.iscoroutinefunction(behaviour)
        call = _Call(method, behaviour, handler.request_deserializer, handler.request_streaming, writes_itself)
        answer = _answer_in_parts if handler.response_streaming else _answer_once
        make: Any = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        made: grpc.RpcMethodHandler[Any, Any] = make(
            _behaviour(call, self._gate, answer), response_serializer=_serializer(handler.response_serializer)
        )
        return made


@dataclass(frozen=True, slots=True)
class _Call:
    """Answers calls of a method."""

    method: str
    behaviour: Behaviour
    deserialize: Callable[[bytes], Any]
    is_streaming: bool  # whether clients stream requests
    writes_itself: bool  # a coroutine function that writes its responses, as grpc's health service has one

    def parse(self, raw: bytes) -> Any:
        """Parses a message. Raises RequestRefused (INVALID_REQUEST) if it cannot."""
        try:
            return self.deserialize(raw)
        except DecodeError:
            raise invalid("request", f"{len(raw)} bytes that are no message of {self.method}") from None

    async def request(self, context: Context, passage: Passage | None) -> Any:
        """The behaviour's argument: the request, or an iterator of requests. Raises RequestRefused."""
        if self.is_streaming:
            return _Messages(self, context, passage)
        raw = await _read(context, passage)
        if raw is grpc.aio.EOF:
            raise _NoRequest
        return await self.parsed(raw)

    async def parsed(self, raw: bytes) -> Any:
        """Parses a message, and lets other tasks run before and after a large one. Raises RequestRefused."""
        if len(raw) > STEP_BYTES:
            await asyncio.sleep(0)  # copying its bytes has just taken a while
        message = self.parse(raw)
        if len(raw) > STEP_BYTES:
            await asyncio.sleep(0)
        return message


async def _read(context: Context, passage: Passage | None) -> Any:
    return await (context.read() if passage is None else passage.read(context))


class _NoRequest(RequestRefused):
    """The client closed its side without a message, or has cancelled the call."""

    def __init__(self) -> None:
        super().__init__(CODE_INVALID_ARGUMENT, INVALID_REQUEST, "request: the call has none", field="request")


class _Messages:
    """The messages of a call that streams them. Raises RequestRefused if one cannot be parsed."""

    def __init__(self, call: _Call, context: Context, passage: Passage | None) -> None:
        self._call, self._context, self._passage = call, context, passage

    def __aiter__(self) -> "_Messages":
        return self

    async def __anext__(self) -> Any:
        raw = await _read(self._context, self._passage)
        if raw is grpc.aio.EOF:
            raise StopAsyncIteration
        return await self._call.parsed(raw)


def _serializer(serialize: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    return lambda response: response if type(response) is bytes else serialize(response)


Answer = Callable[[_Call, Any, Context, Passage | None], Awaitable[Any]]  # to a request


def _behaviour(call: _Call, gate: RequestGate | None, answer: Answer) -> Behaviour:
    """The function that grpc calls. It passes the gate and answers, or ends the call with an error status."""

    async def behaviour(_: Any, context: Context) -> Any:
        request = passage = None
        try:
            passage = None if gate is None else gate.enter(call.method, context)
            request = await call.request(context, passage)
            return await answer(call, request, context, passage)
        except grpc.aio.AbortError as aborted:  # raised by grpc's own services
            _leave_no_cycle(aborted)
            return None
        except BaseException as error:
            if isinstance(_reason(error), asyncio.CancelledError):
                raise
            failure = _failure(_reason(error), call.method, request)
        finally:
            if passage is not None:
                passage.leave()
        request = None  # see _failure
        await _end(context, failure)

    return behaviour


async def _answer_once(call: _Call, request: Any, context: Context, passage: Passage | None) -> Any:
    return await call.behaviour(request, context)


async def _answer_in_parts(call: _Call, request: Any, context: Context, passage: Passage | None) -> None:
    # Writes instead of yielding: if a call is cancelled while its client reads slowly, the behaviour's generator is
    # then closed immediately, in the task and context that it ran in. grpc would leave that to the garbage collector.
    if call.writes_itself:
        await call.behaviour(request, context)
        return
    async with contextlib.aclosing(call.behaviour(request, context)) as responses:
        async for response in responses:
            if passage is not None:
                passage.answer_begins()
            try:
                await context.write(response)
            except grpc.aio.InternalError:
                raise _gone() from None


def _gone() -> asyncio.CancelledError:
    """Raised when gRPC's core can send nothing on a call: its stream has ended, which grpc.aio reports a moment later,
    as a cancellation."""
    return asyncio.CancelledError()


def _reason(error: BaseException) -> BaseException:
    """The RequestRefused with which the gate cancelled the call's task; otherwise the same error."""
    given = error.args[:1] if isinstance(error, asyncio.CancelledError) else ()
    return given[0] if given and isinstance(given[0], RequestRefused) else error


def _failure(error: BaseException, method: str, request: Any) -> RequestRefused:
    """The error for the client.

    It refers to no part of the call. grpc keeps the exception that ends a call together with the call, in a cycle:
    everything that the exception refers to, such as a large request, would stay in memory until the garbage collector
    ran.
    """
    if isinstance(error, RequestRefused):
        error.__context__ = error.__cause__ = None
        return error.with_traceback(None)
    request_id = _request_id_of(request)
    get_logger().error("unexpected error", method=method, request_id=request_id, exc_info=error)
    return internal(request_id)


async def _end(context: Context, failure: RequestRefused) -> None:
    """Ends the call with only the failure's status: after a message, even an empty one, clients would not retry."""
    try:
        await abort_with(context, failure)
    except grpc.aio.AbortError as aborted:
        _leave_no_cycle(aborted)
    except grpc.aio.InternalError:
        raise _gone() from None


def _leave_no_cycle(aborted: grpc.aio.AbortError) -> None:
    """grpc keeps the exception with the call, and raises it again when the handler has returned. The frames of its
    traceback would refer to the call, which would then stay in memory until the garbage collector runs."""
    aborted.__traceback__ = None


def _request_id_of(request: Any) -> str:
    """The request's id, or a new one that both the log and the client get."""
    for named in (request, getattr(request, "submit", None)):
        request_id = getattr(named, "request_id", "")
        if request_id and request_id.isascii() and request_id.isprintable():
            return str(request_id)
    return new_request_id()
