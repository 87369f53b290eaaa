"""One HTTP request to an endpoint: its caller, its body and its response."""

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from starlette.types import Receive, Scope, Send

from trunkline.answer.answer_items import AnswerItem, AnswerItems
from trunkline.status import RequestRefused, internal, invalid, no_worker
from trunkline.v1.generation_pb2 import FINISH_REASON_ABORT, OutputChunk
from trunkline.v1.inference_pb2 import GenerateRequest, GenerateResponse, PromptInfo, Usage
from trunkline_router.access.access import Access, Caller
from trunkline_router.access.gate.http_passage import HttpPassage
from trunkline_router.access.gate.request_gate import RequestGate
from trunkline_router.edge.http.exchange import has_body, respond
from trunkline_router.edge.http.headers import RequestHeaders, rate_limit_headers, response_headers
from trunkline_router.edge.http.json_body import check_content_type, parse_object, read_body
from trunkline_router.edge.http.sse import EventStream
from trunkline_router.edge.request_fields import FieldNames, Fields, Steps, checked, renamed
from trunkline_router.record.error_statuses import Header
from trunkline_router.record.request_record import HTTP, RequestRecord
from trunkline_router.request.inference import Inference
from trunkline_router.request.request_call import NO_EXTRAS, Extras, RequestCall
from trunkline_runtime.log import get_logger
from trunkline_runtime.telemetry.trace_context import new_trace_id

Response = TypeVar("Response")
Result = TypeVar("Result")
Body = TypeVar("Body", bound=Fields)

UNPRINTABLE = re.compile(r"[^ -~]")  # what a header's value must not contain, and all that is not ASCII


@dataclass(frozen=True, slots=True)
class Edge:
    """What all endpoints of a router share.

    keep_alive_s: silence after which a stream sends a comment
    allows_unknown_fields: unknown fields of a request are ignored, and named in a header, instead of refused
    reasoning_field: the field of chat completions that has the model's reasoning
    refuses_server_tools: tools that run at no client are refused, instead of left out and named in a header
    """

    inference: Inference
    access: Access
    gate: RequestGate
    keep_alive_s: float = 15.0
    allows_unknown_fields: bool = False
    reasoning_field: str = "reasoning"
    refuses_server_tools: bool = False


class StreamWriter(Protocol[Response]):  # type: ignore[misc]  # it takes responses alone
    """Writes one answer as server-sent events."""

    def events(self, response: Response) -> bytes:
        """Returns the events for the next response, which may be none."""
        ...

    def end(self) -> bytes:
        """Returns the last events."""
        ...

    def failed(self, refused: RequestRefused) -> bytes:
        """Returns the event for an error after the first byte."""
        ...


class AnswerWriter(StreamWriter[Response], Protocol[Response]):  # type: ignore[misc]
    """Writes one answer as server-sent events, or as a whole."""

    def take(self, response: Response) -> None:
        """Takes the next response, for whole()."""
        ...

    async def whole(self) -> bytes:
        """Returns the whole answer as JSON."""
        ...


@dataclass(slots=True)
class HttpCall:
    """One request whose caller is known and which has passed the gate."""

    edge: Edge
    scope: Scope
    receive: Receive
    send: Send
    headers: RequestHeaders
    caller: Caller
    passage: HttpPassage
    has_begun: bool = False  # whether the response's status is sent
    is_request: bool = False  # whether it has become a request of the path that all protocols share
    is_streaming: bool = False  # whether the response is a stream
    prompt: PromptInfo | None = None  # of the answer; told in headers
    _ignored: list[str] = field(default_factory=list)  # fields that are unknown or without effect, tools left out
    _trace_id: int = 0

    @property
    def request_id(self) -> str:
        return self.headers.request_id

    @property
    def peer(self) -> str:
        """The client's address as gRPC writes it."""
        return self.passage.peer

    @property
    def created(self) -> int:
        """Now, in seconds since 1970."""
        return int(time.time())

    async def body(self, kind: type[Body]) -> Body:
        """Returns the body, with fields that are known and served. Raises RequestRefused (INVALID_REQUEST)."""
        read = self.passage.read_arrived if has_body(self.scope) else self.passage.read
        raw = await read(lambda: read_body(self.receive))
        if not (raw or kind.needs_body):
            return kind()
        check_content_type(self.headers.content_type)
        async with self.passage.turn(len(raw)):
            parsed = await parse_object(raw, self.passage.parsed)
            body, unknown = await self._result(checked(kind, parsed))
        self.check_unknown(unknown)
        if left_out := body.left_out():
            if self.edge.refuses_server_tools:
                raise invalid(left_out[0], "is not supported: the router runs no tools")
            self._ignored += left_out
        if body.model_extra:  # nothing reads it from here on, and a request may run for minutes
            body.model_extra.clear()
        body.check()
        return body

    async def converted(self, body: Fields, steps: Steps[Result]) -> Result:
        """Returns what is made of the body in these steps, in its turn. Raises what they raise. The conversation is
        gone afterwards."""
        async with self.passage.turn():
            result = await self._result(steps)
        body.forget_conversation()
        return result

    async def _result(self, steps: Steps[Result]) -> Result:
        """Takes the steps, with other tasks in between, and counts the time of each."""
        while True:
            begun_s = time.thread_time()
            try:
                next(steps)
            except StopIteration as ended:
                result: Result = ended.value
                return result
            finally:
                self.passage.parsed(time.thread_time() - begun_s)
            await self.passage.step()

    @contextmanager
    def converting(self) -> Iterator[None]:
        """Counts the time for which the event loop makes a request of the body, like the time of parsing it."""
        begun_s = time.thread_time()
        try:
            yield
        finally:
            self.passage.parsed(time.thread_time() - begun_s)

    def check_unknown(self, unknown: list[str]) -> None:
        """Raises RequestRefused (INVALID_REQUEST) for unknown fields, unless the router ignores them."""
        if not unknown:
            return
        if not self.edge.allows_unknown_fields:
            raise invalid(unknown[0], "is not a known field")
        self._ignored += unknown

    def takes_prompt(self, prompt: PromptInfo, names: FieldNames) -> None:
        """Takes what is known of the answer's prompt, for headers."""
        self.prompt = prompt
        self._ignored += map(names, prompt.ignored_fields)

    def request_call(self, request: GenerateRequest, extras: Extras = NO_EXTRAS) -> RequestCall:
        """Returns a request of this call for the path that all protocols share."""
        self.is_request = True
        record = RequestRecord(request.request_id, protocol=HTTP, endpoint=self.scope["path"])
        record.url_scheme, record.is_streamed = self.scope["scheme"], self.is_streaming
        record.trace_id = self._trace_id = self._trace_id or new_trace_id()  # all prompts of a call are in one trace
        return RequestCall(request, record, self.caller, self.headers.metadata, no_deadline, extras, text_stays=True)

    async def respond(
        self,
        body: bytes | Sequence[bytes],
        *,
        status: int = 200,
        headers: Iterable[Header] = (),
        content_type: bytes = b"application/json",
    ) -> None:
        """Sends a whole response; a body may be in pieces."""
        self.has_begun = True
        await respond(self.send, status, body, [*self.response_headers(), *headers], content_type)

    async def send_part(self, pieces: Sequence[bytes], *, more: bool = True) -> None:
        """Sends a part of a response of unknown length; with the first part, its status."""
        if not self.has_begun:
            self.has_begun = True
            headers = [(b"content-type", b"application/json"), *self.response_headers()]
            await self.send({"type": "http.response.start", "status": 200, "headers": headers})
        for piece in pieces:
            await self.send({"type": "http.response.body", "body": piece, "more_body": True})
        if not more:
            await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def answer(
        self, responses: AsyncGenerator[Response, None], writer: AnswerWriter[Response], *, streams: bool | None
    ) -> None:
        """Sends the responses as stream() does, or as a whole. Raises RequestRefused."""
        if streams:
            await self.stream(responses, writer)
            return
        async with aclosing(responses):
            async for response in responses:
                self.passage.answer_begins()
                writer.take(response)
        await self.respond(await writer.whole())

    async def stream(self, responses: AsyncGenerator[Response, None], writer: StreamWriter[Response]) -> None:
        """Sends the responses as events, and an error after the first event as an event too. Raises RequestRefused
        before the first event."""
        self.is_streaming = True  # before the responses begin
        stream = EventStream(self.send, keep_alive_s=self.edge.keep_alive_s, headers=self.response_headers)
        try:
            with stream:
                async with aclosing(responses):
                    async for response in responses:
                        events = writer.events(response)
                        if events:
                            await stream.write(events)
                            self.passage.answer_begins()
                await stream.end(writer.end())
        except asyncio.CancelledError as cancelled:
            refused = given_up(cancelled)
            if refused is None or not stream.has_begun:
                raise
            await stream.end(writer.failed(refused))
        except Exception as error:
            if not stream.has_begun:
                raise
            await stream.end(writer.failed(self.refusal(error)))
        finally:
            self.has_begun = stream.has_begun

    def refusal(self, error: Exception) -> RequestRefused:
        """Returns what the client is told of an error. Logs a bug."""
        if isinstance(error, RequestRefused):
            return error
        get_logger().error("unexpected error", request_id=self.request_id, exc_info=error)
        return internal(self.request_id)

    def response_headers(self) -> list[Header]:
        """Returns the headers of the response, with what is known of the answer now."""
        prompt = self.prompt
        sees_cache = self.caller.identity.sees_cache
        made = response_headers(
            self.request_id,
            worker=prompt.worker_id if prompt is not None and sees_cache else "",
            cached_tokens=prompt.cached_tokens if prompt is not None and sees_cache else None,
        )
        made += self._rate_limits()
        if self._ignored:
            names = ", ".join(UNPRINTABLE.sub("?", name[:64]) for name in self._ignored[:16])
            made.append((b"x-trunkline-warning", b"ignored fields: " + names.encode()))
        return made

    def _rate_limits(self) -> list[Header]:
        caller = self.caller
        shared = self.edge.inference.shared
        limits = shared.rate_limits(caller.tenant, caller.terms.quotas, is_listed=caller.is_listed)
        return rate_limit_headers(limits, self.scope["path"], time.time()) if limits else []


Handler = Callable[[HttpCall], Awaitable[None]]


class CollectedAnswer:
    """The whole answer to one prompt: what the responses of the shared path add up to. Choices after the first one are
    made when they arrive: a body may ask for any number before it is checked."""

    def __init__(self) -> None:
        self.prompt = PromptInfo()
        self.usage = Usage()
        self._choices = [OutputChunk()]  # without their texts
        self._items = [AnswerItems()]

    def take(self, response: GenerateResponse) -> None:
        """Takes the next response."""
        if response.HasField("prompt"):
            self.prompt = response.prompt
        for chunk in response.chunks:
            while chunk.index >= len(self._choices):  # the shared path has checked that the choice was asked for
                self._choices.append(OutputChunk())
                self._items.append(AnswerItems())
            self._choices[chunk.index].MergeFrom(chunk)
            if chunk.text:
                self._items[chunk.index].add_text(chunk.text)
        for part in response.parts:
            self._items[part.index].take(part)
        if response.HasField("usage"):
            self.usage = response.usage

    @property
    def choices(self) -> list[OutputChunk]:
        """Each choice so far as one chunk. Its text is what a reader sees: without reasoning, calls and their marks."""
        for choice, items in zip(self._choices, self._items, strict=True):
            choice.text = items.text
        return self._choices

    def items(self, index: int = 0) -> list[AnswerItem]:
        """Returns what a choice consists of so far."""
        return self._items[index].items if index < len(self._items) else []


async def answer_of(
    call: HttpCall, generate: GenerateRequest, names: FieldNames, extras: Extras = NO_EXTRAS
) -> AsyncGenerator[GenerateResponse, None]:
    """Yields the responses to one request of a call, from the path that all protocols share. Raises
    RequestRefused, with its field as `names` has it."""
    responses = call.edge.inference.generate(call.request_call(generate, extras))
    try:
        async for response in responses:
            for chunk in response.chunks[:]:  # a slice takes half the time
                if chunk.finish_reason == FINISH_REASON_ABORT:
                    raise no_worker("the answer was cancelled at its worker")  # cut text must not look whole
            if call.prompt is None and response.HasField("prompt"):
                call.takes_prompt(response.prompt, names)
            yield response
    except RequestRefused as refused:
        raise renamed(refused, names) from None
    finally:
        await responses.aclose()


def given_up(cancelled: asyncio.CancelledError) -> RequestRefused | None:
    """Returns the refusal with which the gate has cancelled the current task, to make room, and lets the task go on;
    None if the task was cancelled for another reason."""
    given, task = cancelled.args[0] if cancelled.args else None, asyncio.current_task()
    if not isinstance(given, RequestRefused) or task is None:
        return None
    task.uncancel()
    return given


def no_deadline() -> None:
    """The time left of a request over HTTP, which ends when its client goes."""
    return None
