"""The router's end of a worker's Session stream."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from trunkline.proof import Metadata
from trunkline.protocol import PROTOCOL_VERSION
from trunkline.v1.worker_pb2 import SessionHello, SessionRequest, SessionWelcome, Submit
from trunkline_router.workers.claims.model_check import FalseClaim
from trunkline_router.workers.claims.worker_claims import (
    MAX_CONTEXT_TOKENS,
    MAX_VOCAB_SIZE,
    Expected,
    most_output_bytes,
)
from trunkline_router.workers.sessions.awaited_ends import EndSink
from trunkline_router.workers.sessions.session_message import split_request
from trunkline_router.workers.sessions.session_outputs import (
    LOST,
    GrantedChoice,
    GrantSink,
    OpenChoice,
    SessionOutputs,
    Sink,
    lost,
)
from trunkline_router.workers.sessions.sink_call import deliver
from trunkline_runtime.wire import NotAMessage

METHOD = "/trunkline.v1.WorkerService/Session"

# Pause after a message while other choices are open there: under load submits leave together, at a fraction of the cost
# of one message each, here and at the worker. Shorter than a worker's step.
REST_S = 0.002


class WorkerSession:
    """Sends submits and aborts to a worker, and passes each output to the sink of its handle.

    Submits and aborts of one turn of the event loop share a message. Under load, so do those that arrive during the
    pause (`rest`) after the previous message.

    vocab_size: of the worker's model; token ids are below it. most_tokens: of prompt and output together.
    """

    def __init__(
        self,
        rest: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(REST_S),
        *,
        vocab_size: int = MAX_VOCAB_SIZE,
        most_tokens: int = MAX_CONTEXT_TOKENS,
    ) -> None:
        self._rest = rest
        self._vocab_size, self._most_tokens = vocab_size, most_tokens
        self.outputs = SessionOutputs(vocab_size, lambda handle: self.abort([handle]))
        self._pending = SessionRequest()
        self._wake = asyncio.Event()
        self._broken = False
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

    @property
    def is_broken(self) -> bool:
        """Whether the stream has ended."""
        return self._broken

    def submit(self, submits: Iterable[Submit], sinks: Iterable[Sink]) -> list[int]:
        """Sends choices. The outputs of each go to its sink; the last has a finish reason or an error. Returns the
        handles."""
        handles = []
        outputs = self.outputs
        for submit, sink in zip(submits, sinks, strict=True):
            outputs.last_handle += 1
            submit.handle = outputs.last_handle
            handles.append(submit.handle)
            if self._broken:
                deliver(sink, lost(submit.handle, LOST))
                continue
            outputs.open[submit.handle] = OpenChoice(sink, self._expected(submit))
            self._pending.submits.append(submit)
        self._wake.set()
        return handles

    def grant(self, submits: Iterable[Submit], sink: GrantSink) -> list[int]:
        """Gives handles to choices that clients will submit, for the worker's reports. Returns the handles."""
        handles = []
        outputs = self.outputs
        for submit in submits:
            outputs.last_handle += 1
            submit.handle, submit.report_session = outputs.last_handle, self.number
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
                    num_awaited += self.outputs.ends.await_end(handle, on_end)
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
                await self.outputs.receive(raw, on_welcome)
        except (DecodeError, NotAMessage):
            raise FalseClaim("the worker sent something in its session that is not a message") from None
        finally:
            writing.cancel()
            call.cancel()
            self._break()

    def _expected(self, submit: Submit) -> Expected:
        return Expected(
            submit.choice,
            self._most_output(submit) - len(submit.resume.output_token_ids),
            len(submit.prompt_token_ids),
            self._vocab_size,
            submit.suspect,
            most_bytes=most_output_bytes(submit),
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
                if self.num_open > len(request.submits):
                    await self._rest()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            call.cancel()  # the reader sees the end of the stream and reports why

    def _break(self) -> None:
        self._broken = True
        self.outputs.end_all(LOST)
        self.outputs.end_grants()
        self.outputs.ends.give_up()
