"""The router's end of a worker's Session stream."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from trunkline.proof import Metadata
from trunkline.v1.worker_pb2 import SessionHello, SessionRequest, SessionWelcome, Submit
from trunkline_router.claims.model_check import FalseClaim
from trunkline_router.claims.worker_claims import MAX_CONTEXT_TOKENS, MAX_VOCAB_SIZE, Expected, most_output_bytes
from trunkline_router.sessions.session_message import split_request
from trunkline_router.sessions.session_outputs import (
    LOST,
    GrantedChoice,
    GrantSink,
    OpenChoice,
    SessionOutputs,
    Sink,
    lost,
    tell,
)
from trunkline_runtime.wire import NotAMessage

METHOD = "/trunkline.v1.WorkerService/Session"

# While others are open there, the next message waits for so long after one: under load submits leave together, at a
# fraction of what one each would take here and at the worker. That is less than a worker's step takes.
REST_S = 0.002


class WorkerSession:
    """Submits and aborts of one turn of the event loop leave in one message, and under load also those that come
    while the last message has its `rest`; outputs go to their sinks by handle.

    vocab_size: of the worker's model, token ids are below it; most_tokens: of prompt and output together there
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
        self.number = 0  # by which the worker knows it in grants; 0: it does not, or is not there yet

    @property
    def num_open(self) -> int:
        """Choices without a last output."""
        return len(self.outputs.open)

    @property
    def num_step_outputs(self) -> int:
        """Outputs of the worker's steps so far."""
        return self.outputs.num_step_outputs

    @property
    def is_broken(self) -> bool:
        """Whether the stream has ended."""
        return self._broken

    def submit(self, submits: Iterable[Submit], sinks: Iterable[Sink]) -> list[int]:
        """Sends choices; each one's news go to its sink, the last with a finish or an error. Returns their handles."""
        handles = []
        outputs = self.outputs
        for submit, sink in zip(submits, sinks, strict=True):
            outputs.last_handle += 1
            submit.handle = outputs.last_handle
            handles.append(submit.handle)
            if self._broken:
                tell(sink, lost(submit.handle, LOST))
                continue
            outputs.open[submit.handle] = OpenChoice(sink, self._expected(submit))
            self._pending.submits.append(submit)
        self._wake.set()
        return handles

    def grant(self, submits: Iterable[Submit], sink: GrantSink) -> list[int]:
        """Names choices that clients will bring, so that the worker reports them here. Returns their handles."""
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

    def abort(self, handles: Iterable[int]) -> None:
        """Has the worker end these choices. Those that have ended are left alone."""
        for handle in handles:
            if self.outputs.drop(handle):
                self._pending.abort_handles.append(handle)
                self._wake.set()

    def give_up(self, why: str) -> None:
        """Nothing more is expected of what is open: it ends with UNAVAILABLE, and the worker should drop it."""
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
        """Talks to the worker until the stream breaks; then every open choice ends with UNAVAILABLE. Raises FalseClaim
        where what the worker says cannot be true, beyond what a bug with single requests would explain."""
        # Without a parser: what comes is parsed in parts where it is long.
        open_stream: Any = channel.stream_stream(METHOD, request_serializer=SessionRequest.SerializeToString)
        call = open_stream(metadata=metadata)
        welcomed = asyncio.Event()
        writing = asyncio.create_task(self._write(call, router_id, welcomed))

        def welcome(said: SessionWelcome) -> None:
            if welcomed.is_set():
                raise FalseClaim("the worker opens its session twice")
            self.number = said.session
            on_open(said)
            welcomed.set()

        try:
            async for raw in call:
                await self.outputs.hear(raw, welcome)
        except (DecodeError, NotAMessage):
            raise FalseClaim("the worker says in its session what is no message") from None
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
        """Output tokens that a choice may come to, those of its ledger included."""
        sampling = submit.sampling
        return sampling.max_tokens if sampling.HasField("max_tokens") else self._most_tokens

    async def _write(
        self, call: "grpc.aio.StreamStreamCall[Any, Any]", router_id: str, welcomed: asyncio.Event
    ) -> None:
        await welcomed.wait()  # to write to a stream that is being refused would hide the worker's reason
        try:
            await call.write(SessionRequest(hello=SessionHello(router_id=router_id)))
            while True:
                await self._wake.wait()
                self._wake.clear()
                request, self._pending = self._pending, SessionRequest()
                for part in split_request(request):
                    await call.write(part)
                if self.num_open > len(request.submits):
                    await self._rest()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            call.cancel()  # the reader sees the end of the stream and says why

    def _break(self) -> None:
        self._broken = True
        self.outputs.end_all(LOST)
        self.outputs.end_grants()
