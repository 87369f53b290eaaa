"""The router's end of a worker's Session stream."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import grpc

from trunkline.channel import MAX_MESSAGE_BYTES
from trunkline.proof import Metadata
from trunkline.status import no_worker
from trunkline.v1.worker_pb2 import (
    GrantReport,
    SequenceOutput,
    SessionHello,
    SessionRequest,
    SessionWelcome,
    Submit,
)
from trunkline_runtime.log import get_logger

if TYPE_CHECKING:
    from trunkline.v1.worker_pb2_grpc import WorkerServiceAsyncStub  # exists in the stub file only

MAX_REQUEST_BYTES = MAX_MESSAGE_BYTES // 4  # of submits in one message

# While others are open there, the next message waits for so long after one: under load submits leave together, at a
# fraction of what one each would take here and at the worker. That is less than a worker's step takes.
REST_S = 0.002

LOST = "the worker was lost while it computed this request"

Sink = Callable[[SequenceOutput], None]
# What became of a grant, by its handle; None: the stream has ended, and nothing more is told.
GrantSink = Callable[[int, GrantReport | None], None]


class WorkerSession:
    """Submits and aborts of one turn of the event loop leave in one message, and under load also those that come
    while the last message has its `rest`; outputs go to their sinks by handle."""

    def __init__(self, rest: Callable[[], Awaitable[None]] = lambda: asyncio.sleep(REST_S)) -> None:
        self._rest = rest
        self._sinks: dict[int, Sink] = {}
        self._granted: dict[int, GrantSink] = {}
        self._next_handle = 0
        self._pending = SessionRequest()
        self._wake = asyncio.Event()
        self._broken = False
        self.number = 0  # by which the worker knows it in grants; 0: it does not, or is not there yet
        self.num_news = 0  # outputs of steps; refusals, which a front gives without its engine, are none

    @property
    def num_open(self) -> int:
        """Choices without a last output."""
        return len(self._sinks)

    @property
    def is_broken(self) -> bool:
        """Whether the stream has ended."""
        return self._broken

    def submit(self, submits: Iterable[Submit], sinks: Iterable[Sink]) -> list[int]:
        """Sends choices; each one's news go to its sink, the last with a finish or an error. Returns their handles."""
        handles = []
        for submit, sink in zip(submits, sinks, strict=True):
            self._next_handle += 1
            submit.handle = self._next_handle
            handles.append(submit.handle)
            if self._broken:
                _tell(sink, _lost(submit.handle, LOST))
                continue
            self._sinks[submit.handle] = sink
            self._pending.submits.append(submit)
        self._wake.set()
        return handles

    def grant(self, submits: Iterable[Submit], sink: GrantSink) -> list[int]:
        """Names choices that clients will bring, so that the worker reports them here. Returns their handles."""
        handles = []
        for submit in submits:
            self._next_handle += 1
            submit.handle, submit.report_session = self._next_handle, self.number
            self._granted[submit.handle] = sink
            handles.append(submit.handle)
        return handles

    def forget(self, handles: Iterable[int]) -> None:
        """Nobody wants to hear of these grants any more."""
        for handle in handles:
            self._granted.pop(handle, None)

    def abort(self, handles: Iterable[int]) -> None:
        """Nobody waits for these any more; those that have ended are left alone."""
        for handle in handles:
            if self._sinks.pop(handle, None) is not None:
                self._pending.abort_handles.append(handle)
                self._wake.set()

    def give_up(self, why: str) -> None:
        """Nothing more is expected of what is open: it ends with UNAVAILABLE, and the worker should drop it."""
        self._pending.abort_handles.extend(self._sinks)
        self._wake.set()
        self._end_all(why)

    async def run(
        self,
        stub: "WorkerServiceAsyncStub",
        router_id: str,
        on_open: Callable[[SessionWelcome], None],
        metadata: Metadata = (),
    ) -> None:
        """Talks to the worker until the stream breaks; then every open choice ends with UNAVAILABLE."""
        call = stub.Session(metadata=metadata)
        welcomed = asyncio.Event()
        writing = asyncio.create_task(self._write(call, router_id, welcomed))
        try:
            async for response in call:
                if response.HasField("welcome"):
                    self.number = response.welcome.session
                    on_open(response.welcome)
                    welcomed.set()
                for output in response.outputs:
                    self._hand_out(output)
        finally:
            writing.cancel()
            call.cancel()
            self._break()

    def _hand_out(self, output: SequenceOutput) -> None:
        is_error = output.HasField("error")
        ended = is_error or output.chunk.finish_reason
        sink = self._sinks.pop(output.handle, None) if ended else self._sinks.get(output.handle)
        if sink is None and output.HasField("granted"):
            self._hear_of_grant(output.handle, output.granted)
            return
        self.num_news += not is_error
        if sink is None:
            return  # aborted meanwhile
        if not _tell(sink, output) and not ended:
            self.abort([output.handle])

    def _hear_of_grant(self, handle: int, report: GrantReport) -> None:
        hear = self._granted.pop(handle, None) if report.ended else self._granted.get(handle)
        if hear is not None:
            _tell(hear, handle, report)

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
        self._end_all(LOST)
        granted, self._granted = self._granted, {}
        for handle, hear in granted.items():
            _tell(hear, handle, None)

    def _end_all(self, why: str) -> None:
        sinks, self._sinks = self._sinks, {}
        for handle, sink in sinks.items():
            _tell(sink, _lost(handle, why))


def split_request(request: SessionRequest) -> Iterator[SessionRequest]:
    """The same in messages that a worker accepts: a burst of long prompts can be more than one may hold."""
    if len(request.submits) <= 1 or request.ByteSize() <= MAX_REQUEST_BYTES:
        if request.submits or request.abort_handles:
            yield request  # as it is: to copy a prompt of 8,000 tokens once more takes 150 µs
        return
    part, size = SessionRequest(), 0
    for submit in request.submits:
        submit_bytes = submit.ByteSize()
        if part.submits and size + submit_bytes > MAX_REQUEST_BYTES:
            yield part
            part, size = SessionRequest(), 0
        part.submits.append(submit)
        size += submit_bytes
    # Last: an abort must not overtake its own submit.
    part.abort_handles.extend(request.abort_handles)
    if part.submits or part.abort_handles:
        yield part


def _tell(hear: Callable[..., None], *news: object) -> bool:
    """Whether it took the news: what one request's bug raises must not end the session, which others share."""
    try:
        hear(*news)
    except Exception as error:
        get_logger().error("unexpected error", exc_info=error)
        return False
    return True


def _lost(handle: int, why: str) -> SequenceOutput:
    return SequenceOutput(handle=handle, error=no_worker(why).to_proto())
