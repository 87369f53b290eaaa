"""The router's end of a worker's Session stream: submits and aborts one way, outputs the other."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from trunkline.proof import Metadata
from trunkline.protocol import MAX_SUBMITS_BYTES, PROTOCOL_VERSION
from trunkline.status import CODE_RESOURCE_EXHAUSTED, OVERLOADED, RequestRefused
from trunkline.v1.worker_pb2 import (
    Grammar,
    SequenceOutput,
    SessionHello,
    SessionRequest,
    SessionResponse,
    SessionWelcome,
    Submit,
)
from trunkline.validation import WHOLE_OUTPUTS
from trunkline_router.routing.step_times import StepTimes
from trunkline_router.workers.claims import MAX_CONTEXT_TOKENS, MAX_VOCAB_SIZE, FalseClaim
from trunkline_router.workers.output_claims import OpenChoice, Sink, most_output_bytes
from trunkline_router.workers.session_grammars import SessionGrammars
from trunkline_router.workers.session_outputs import (
    LOST,
    EndSink,
    GrantedChoice,
    GrantSink,
    SessionOutputs,
    deliver,
    lost,
)
from trunkline_runtime.wire import LENGTH, VARINT, NotAMessage, fields, varint

METHOD = "/trunkline.v1.WorkerService/Session"

# Pause after a message with aborts, or while other choices are open there: under load submits and aborts leave
# together, at a fraction of the cost of one message each, here and at the worker. Shorter than a worker's step.
# grpc.aio wakes the event loop for each message and reads one wake-up in a turn, so the pause also lasts some turns: a
# router whose turns are long sends fewer messages.
REST_S = 0.002
REST_TURNS = 4
# Outputs of a message that are handed out without a pause: one or two milliseconds.
FEW_OUTPUTS = 256
# Longest message that is parsed at once: about a millisecond, whatever it contains. Longer ones are parsed in parts.
PART_BYTES = 64 << 10
PART_FIELDS = 1024  # finding the ends of this many takes half a millisecond
# Beside outputs, in a response that is parsed in parts. A newer worker may send fields that this router does not know.
MAX_OTHER_BYTES = 4 << 10
NO_ROOM = RequestRefused(
    CODE_RESOURCE_EXHAUSTED,
    OVERLOADED,
    "the worker's room for grammars is taken by those of requests that are about to be sent",
    retry_delay_ms=1000,
)

_OUTPUTS = SessionResponse.OUTPUTS_FIELD_NUMBER
_OUTPUTS_TAG = _OUTPUTS << 3 | LENGTH
_HANDLE_TAG = SequenceOutput.HANDLE_FIELD_NUMBER << 3 | VARINT


async def rest() -> None:
    await asyncio.sleep(REST_S)
    for _ in range(REST_TURNS):
        await asyncio.sleep(0)


class WorkerSession:
    """Sends submits and aborts to a worker, and passes each output to the sink of its handle.

    Submits and aborts of one turn of the event loop share a message. Under load, so do those that arrive during the
    pause (`rest`) after the previous message.

    vocab_size: of the worker's model; token ids are below it. most_tokens: of prompt and output together.
    most_grammar_bytes: of grammars that the worker keeps for the session. dimensions: of vectors; 0: not known
    """

    def __init__(
        self,
        rest: Callable[[], Awaitable[None]] = rest,
        *,
        vocab_size: int = MAX_VOCAB_SIZE,
        most_tokens: int = MAX_CONTEXT_TOKENS,
        most_grammar_bytes: int = 0,
        clock_s: Callable[[], float] = time.monotonic,
        dimensions: int = 0,
    ) -> None:
        self._rest, self._clock_s = rest, clock_s
        self._vocab_size, self._most_tokens, self._dimensions = vocab_size, most_tokens, dimensions
        self.steps = StepTimes()
        self.outputs = SessionOutputs(lambda handle: self.abort([handle]))
        self._grammars = SessionGrammars(most_grammar_bytes)
        self._pending = SessionRequest()
        self._wake = asyncio.Event()
        self.is_broken = False  # the stream has ended
        self.number = 0  # the worker's number for it, used in grants; 0: not known yet

    @property
    def num_open(self) -> int:
        """Choices whose last output has not arrived."""
        return len(self.outputs.open)

    @property
    def num_unsent(self) -> int:
        """Submits and aborts that wait to be written."""
        return len(self._pending.submits) + len(self._pending.abort_handles)

    @property
    def num_step_outputs(self) -> int:
        """Outputs of the worker's steps received so far."""
        return self.outputs.num_step_outputs

    def submit(self, submits: Iterable[Submit], sinks: Iterable[Sink]) -> list[int]:
        """Sends choices. The outputs of each go to its sink; the last has a finish reason or an error. Returns the
        handles."""
        handles = []
        outputs = self.outputs
        for submit, sink in zip(submits, sinks, strict=True):
            submit.handle = outputs.new_handle()
            handles.append(submit.handle)
            if self.is_broken:
                deliver(sink, lost(submit.handle, LOST))
                continue
            if submit.work.HasField("grammar") and not self._name_grammar(submit.work.grammar):
                deliver(sink, SequenceOutput(handle=submit.handle, error=NO_ROOM.to_proto()))
                continue
            outputs.open[submit.handle] = self._choice(submit, sink)
            self._pending.submits.append(submit)
        self._wake.set()
        return handles

    def grant(self, submits: Iterable[Submit], sink: GrantSink) -> list[int]:
        """Gives handles to choices that clients will submit, for the worker's reports. Returns the handles."""
        handles = []
        outputs = self.outputs
        for submit in submits:
            submit.handle, submit.report_session = outputs.new_handle(), self.number
            granted = GrantedChoice(sink, self._most_output(submit), len(submit.prompt_token_ids))
            outputs.granted[submit.handle] = granted
            handles.append(submit.handle)
        return handles

    def forget(self, handles: Iterable[int]) -> None:
        """Drops these grants: reports on them are no longer passed on."""
        self.outputs.forget(handles)

    def abort(self, handles: Iterable[int], on_end: EndSink | None = None) -> int:
        """Has the worker end these choices. Choices that have ended already are ignored. Returns how often `on_end`
        will be called, with what became of a choice."""
        num_awaited = 0
        for handle in handles:
            if self.outputs.drop(handle):
                self._pending.abort_handles.append(handle)
                self._wake.set()
                if on_end is not None:
                    num_awaited += self.outputs.await_end(handle, on_end)
        return num_awaited

    def give_up(self, why: str) -> None:
        """Ends every open choice with UNAVAILABLE, and has the worker abort them."""
        self._pending.abort_handles.extend(self.outputs.open)
        self._wake.set()
        self.outputs.end_all(why)

    async def run(
        self,
        channel: grpc.aio.Channel,
        router_id: str,
        on_open: Callable[[SessionWelcome], None],
        metadata: Metadata = (),
    ) -> None:
        """Runs the stream until it breaks; then every open choice ends with UNAVAILABLE. Raises FalseClaim if the
        worker sends what cannot be true, beyond what a bug with single requests explains."""
        # Without a deserializer: long messages are parsed in parts.
        open_stream: Any = channel.stream_stream(METHOD, request_serializer=SessionRequest.SerializeToString)
        call = open_stream(metadata=metadata)
        welcomed = asyncio.Event()
        writing = asyncio.create_task(self._write(call, router_id, welcomed))

        def on_welcome(welcome: SessionWelcome) -> None:
            if welcomed.is_set():
                raise FalseClaim("the worker opens its session twice")
            self.number = welcome.session
            on_open(welcome)
            welcomed.set()

        try:
            async for raw in call:
                await self.receive(raw, on_welcome)
        except (DecodeError, NotAMessage):
            raise FalseClaim("the worker sent something in its session that is not a message") from None
        finally:
            writing.cancel()
            call.cancel()
            self.is_broken = True
            self.outputs.close(LOST)

    async def receive(self, raw: bytes, on_welcome: Callable[[SessionWelcome], None]) -> None:
        """Takes one message. Raises FalseClaim, DecodeError or NotAMessage."""
        now_s, num_before = self._clock_s(), self.num_step_outputs
        if len(raw) <= PART_BYTES:
            await self._receive_part(raw, on_welcome)
        else:
            for part in split_response(raw, PART_BYTES, PART_FIELDS):
                if len(part) <= PART_BYTES or self.outputs.may_be_large(large_output(part), len(part)):
                    await self._receive_part(part, on_welcome)
                await asyncio.sleep(0)
        if self.num_step_outputs > num_before:
            self.steps.ended(now_s)

    async def _receive_part(self, raw: bytes, on_welcome: Callable[[SessionWelcome], None]) -> None:
        response = SessionResponse.FromString(raw)
        if response.HasField("welcome"):
            on_welcome(response.welcome)
        outputs = response.outputs
        if len(outputs) <= FEW_OUTPUTS:
            self.outputs.hand_out_all(outputs)
            return
        for start in range(0, len(outputs), FEW_OUTPUTS):
            self.outputs.hand_out_all(outputs[start : start + FEW_OUTPUTS])
            await asyncio.sleep(0)

    def _name_grammar(self, grammar: Grammar) -> bool:
        """Leaves only the digest of a submit's grammar, which the worker gets first. Returns False if the worker has no
        room for it."""
        if not self._grammars.name(grammar, self._pending, self._unsent_grammars):
            return False
        grammar.CopyFrom(Grammar(digest=grammar.digest))
        return True

    def _unsent_grammars(self) -> set[bytes]:
        return {submit.work.grammar.digest for submit in self._pending.submits}

    def _choice(self, submit: Submit, sink: Sink) -> OpenChoice:
        return OpenChoice(
            submit.choice,
            sink,
            max(0, self._most_output(submit) - len(submit.resume.output_token_ids)),
            len(submit.prompt_token_ids),
            self._vocab_size,
            suspect=submit.suspect,
            has_logprobs=submit.sampling.HasField("logprobs"),
            most_bytes=most_output_bytes(submit),
            whole=WHOLE_OUTPUTS.get(submit.work.output, ""),
            dimensions=submit.work.dimensions or self._dimensions,
        )

    def _most_output(self, submit: Submit) -> int:
        """Returns the most output tokens of a choice, including those in its ledger."""
        sampling = submit.sampling
        return sampling.max_tokens if sampling.HasField("max_tokens") else self._most_tokens

    async def _write(
        self, call: "grpc.aio.StreamStreamCall[Any, Any]", router_id: str, welcomed: asyncio.Event
    ) -> None:
        hello = SessionHello(router_id=router_id, protocol_version=PROTOCOL_VERSION)
        await welcomed.wait()  # a write to a stream that is being refused would hide the worker's reason
        try:
            await call.write(SessionRequest(hello=hello))
            while True:
                await self._wake.wait()
                self._wake.clear()
                request, self._pending = self._pending, SessionRequest()
                for part in split_request(request):
                    await call.write(part)
                if request.abort_handles or self.num_open > len(request.submits):
                    await self._rest()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            call.cancel()  # the reader sees the end of the stream and reports why


def split_request(request: SessionRequest) -> Iterator[SessionRequest]:
    """Yields the request in messages that a worker accepts: a burst of long prompts can exceed one message. Grammars
    come before the submits that name them, and after the digests of those that they displace."""
    if request.dropped_grammars:
        yield SessionRequest(dropped_grammars=request.dropped_grammars)
    for grammar in request.grammars:
        yield SessionRequest(grammars=[grammar])
    request.ClearField("dropped_grammars")
    request.ClearField("grammars")
    if len(request.submits) <= 1 or request.ByteSize() <= MAX_SUBMITS_BYTES:
        if request.submits or request.abort_handles:
            yield request  # uncopied: a copy of a prompt of 8,000 tokens takes 150 µs
        return
    part, size = SessionRequest(), 0
    for submit in request.submits:
        submit_bytes = submit.ByteSize()
        if part.submits and size + submit_bytes > MAX_SUBMITS_BYTES:
            yield part
            part, size = SessionRequest(), 0
        part.submits.append(submit)
        size += submit_bytes
    # Last: an abort must not overtake its own submit.
    part.abort_handles.extend(request.abort_handles)
    if part.submits or part.abort_handles:
        yield part


def split_response(raw: bytes, most_bytes: int, most_fields: int) -> Iterator[bytes]:
    """Yields a SessionResponse in parts, each of at most `most_bytes`, or of a single field, and of at most
    `most_fields`. Raises NotAMessage; raises FalseClaim if no honest worker would send it."""
    begin = num_fields = other_bytes = 0
    for _, field_at, _, field_end in fields(raw):
        if raw[field_at] != _OUTPUTS_TAG:
            other_bytes += field_end - field_at
            if other_bytes > MAX_OTHER_BYTES:
                raise FalseClaim(f"a message of the worker's session has {MAX_OTHER_BYTES} bytes that are no outputs")
        if begin < field_at and (field_end - begin > most_bytes or num_fields == most_fields):
            yield raw[begin:field_at]
            begin, num_fields = field_at, 0
        num_fields += 1
    if begin < len(raw):
        yield raw[begin:]


def large_output(part: bytes) -> int:
    """Returns the handle of a SessionResponse's only field, an output. Relies on every writer putting the fields of a
    message in the order of their numbers. Raises NotAMessage, and FalseClaim if the field is not an output."""
    ((number, _, value_at, _),) = fields(part)
    if number != _OUTPUTS or part[value_at] != _HANDLE_TAG:
        raise FalseClaim(f"the worker sends {len(part)} bytes that are not an output")
    return varint(part, value_at + 1)[0]
