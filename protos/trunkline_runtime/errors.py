"""From exceptions to gRPC statuses with google.rpc details, at one seam: a server interceptor."""

import asyncio
import contextlib
import inspect
import uuid
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, NoReturn, Protocol

import grpc
from google.protobuf.any_pb2 import Any as AnyProto
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, QuotaFailure, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_status.rpc_status import to_status

from trunkline.status import CODE_INTERNAL, ERROR_DOMAIN, INTERNAL, RequestRefused, invalid
from trunkline_runtime.log import get_logger

# A status travels in trailing metadata, 8 KiB for all of it; a message may quote what a client sent.
MAX_MESSAGE_CHARACTERS = 400


def rich_status(refused: RequestRefused) -> Status:
    """A google.rpc.Status with ErrorInfo, and BadRequest, QuotaFailure and RetryInfo where they apply."""
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


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], refused: RequestRefused) -> NoReturn:
    """Ends the RPC with the refusal's status."""
    status = to_status(rich_status(refused))
    await context.abort(status.code, status.details or "", status.trailing_metadata or ())
    raise AssertionError("abort() does not return")


class RequestGate(Protocol):
    """What a request passes before it is parsed, in the form in which it came. Both raise RequestRefused."""

    def check(self, method: str, raw: bytes) -> None:
        """Whether a message to this method, by its full name, is worth parsing."""

    def holding(self, raw: bytes, metadata: "Metadata | None") -> AbstractContextManager[None]:
        """The request's part in the memory that requests may take, held until its answer begins. The capacity of what
        answers bounds the requests that are being answered."""


Metadata = Iterable[tuple[str, str | bytes]]


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """RequestRefused becomes its row of the error table; anything unexpected INTERNAL, logged, without internals.

    gate: asked before a request is parsed. Parsing happens here, so that a request that cannot be parsed is refused as
    any other bad one.
    """

    def __init__(self, gate: RequestGate | None = None) -> None:
        self._gate = gate

    async def intercept_service(
        self,
        continuation: "Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]]",
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return None  # unimplemented: grpc answers by itself
        method = handler_call_details.method
        kind = ("stream" if handler.request_streaming else "unary") + (
            "_stream" if handler.response_streaming else "_unary"
        )
        behaviour, parse = getattr(handler, kind), self._parser(method, handler.request_deserializer)
        wrap = _stream if handler.response_streaming else _unary
        make = getattr(grpc, kind + "_rpc_method_handler")
        made: grpc.RpcMethodHandler[Any, Any]
        if handler.request_streaming:  # grpc parses as the behaviour reads: a refusal is raised there
            made = make(
                wrap(behaviour, method, None, None),
                request_deserializer=parse,
                response_serializer=handler.response_serializer,
            )
        else:
            made = make(wrap(behaviour, method, parse, self._gate), response_serializer=handler.response_serializer)
        return made

    def _parser(self, method: str, deserialize: "Parse") -> "Parse":
        def parse(raw: bytes) -> Any:
            if self._gate is not None:
                self._gate.check(method, raw)
            try:
                return deserialize(raw)
            except DecodeError:
                raise invalid("request", f"{len(raw)} bytes that are no message of {method}") from None

        return parse


Parse = Callable[[bytes], Any]
Behaviour = Callable[[Any, grpc.aio.ServicerContext[Any, Any]], Any]


NO_GATE: AbstractContextManager[None] = contextlib.nullcontext()


def _unary(behaviour: Behaviour, method: str, parse: Parse | None, gate: RequestGate | None) -> Behaviour:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            with NO_GATE if gate is None else gate.holding(request, context.invocation_metadata()):
                if parse is not None:
                    request = parse(request)
                return await behaviour(request, context)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except BaseException as error:
            await _end(context, method, error, request)

    return call


def _stream(behaviour: Behaviour, method: str, parse: Parse | None, gate: RequestGate | None) -> Behaviour:
    # Writes instead of yielding: a call that is cancelled while its client reads slowly then closes the behaviour's
    # generator here and now, in the task and the context that it ran in. grpc would leave that to the collector.
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        try:
            with contextlib.ExitStack() as held:
                if gate is not None:
                    held.enter_context(gate.holding(request, context.invocation_metadata()))
                if parse is not None:
                    request = parse(request)
                answer = behaviour(request, context)
                if inspect.isawaitable(answer):  # it writes by itself, as grpc's own health service does
                    await answer
                    return
                has_begun = False
                async with contextlib.aclosing(answer) as responses:
                    async for response in responses:
                        if not has_begun:
                            has_begun = True
                            held.close()
                        await context.write(response)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except BaseException as error:
            await _end(context, method, error, request)

    return call


async def _end(
    context: grpc.aio.ServicerContext[Any, Any], method: str, error: BaseException, request: Any
) -> NoReturn:
    if isinstance(error, RequestRefused):
        await abort_with(context, error)
    request_id = _request_id_of(request)
    get_logger().error("unexpected error", method=method, request_id=request_id, exc_info=error)
    message = f"an internal error; the server's log has it under request {request_id}"
    await abort_with(context, RequestRefused(CODE_INTERNAL, INTERNAL, message))


def _request_id_of(request: Any) -> str:
    """The name that the request has, or one for the log and the client to share."""
    for named in (request, getattr(request, "submit", None)):
        request_id = getattr(named, "request_id", "")
        if request_id and request_id.isascii() and request_id.isprintable():
            return str(request_id)
    return uuid.uuid4().hex
