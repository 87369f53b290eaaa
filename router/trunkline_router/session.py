"""The router's end of a worker's Session stream."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc

from trunkline.channel import MAX_MESSAGE_BYTES
from trunkline.proof import Metadata
from trunkline.status import no_worker
from trunkline.v1.generation_pb2 import OutputChunk
from trunkline.v1.worker_pb2 import (
    GrantReport,
    SequenceOutput,
    SessionHello,
    SessionRequest,
    SessionWelcome,
    Submit,
)
from trunkline_router.model_check import FalseClaim
from trunkline_router.worker_claims import (
    MAX_CONTEXT_TOKENS,
    MAX_VOCAB_SIZE,
    Expected,
    end_problem,
    output_problem,
    report_problem,
)
from trunkline_runtime.log import get_logger

if TYPE_CHECKING:
    from trunkline.v1.worker_pb2_grpc import WorkerServiceAsyncStub  # exists in the stub file only

MAX_REQUEST_BYTES = MAX_MESSAGE_BYTES // 4  # of submits in one message

# While others are open there, the next message waits for so long after one: under load submits leave together, at a
# fraction of what one each would take here and at the worker. That is less than a worker's step takes.
REST_S = 0.002

FEW_OUTPUTS = 128  # of a message, handed out at once: for more, others have their turn in between

LOST = "the worker was lost while it computed this request"

# One answer that makes no sense may be a bug that one request meets. A worker of which more than this many do, and more
# than this share of all, is left alone.
FALSE_ANSWERS, FALSE_SHARE = 3, 0.1

# Takes the news; False where they do not follow what came before.
Sink = Callable[[SequenceOutput], object]
# What became of a grant, by its handle; None: the stream has ended, and nothing more is told.
GrantSink = Callable[[int, GrantReport | None], None]


@dataclass(slots=True, frozen=True)
class _Open:
    """A choice that the worker computes."""

    sink: Sink
    expected: Expected


@dataclass(slots=True, frozen=True)
class _Granted:
    """The same of one that a client takes there."""

    sink: GrantSink
    most_tokens: int
    prompt_tokens: int


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
        self._open: dict[int, _Open] = {}
        self._granted: dict[int, _Granted] = {}
        self._num_ended = self._num_false = 0  # answers
        self._next_handle = 0
        self._pending = SessionRequest()
        self._wake = asyncio.Event()
        self._broken = False
        self.number = 0  # by which the worker knows it in grants; 0: it does not, or is not there yet
        self.num_news = 0  # outputs of steps; refusals, which a front gives without its engine, are none

    @property
    def num_open(self) -> int:
        """Choices without a last output."""
        return len(self._open)

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
            self._open[submit.handle] = _Open(sink, self._expected(submit))
            self._pending.submits.append(submit)
        self._wake.set()
        return handles

    def grant(self, submits: Iterable[Submit], sink: GrantSink) -> list[int]:
        """Names choices that clients will bring, so that the worker reports them here. Returns their handles."""
        handles = []
        for submit in submits:
            self._next_handle += 1
            submit.handle, submit.report_session = self._next_handle, self.number
            self._granted[submit.handle] = _Granted(sink, self._most_output(submit), len(submit.prompt_token_ids))
            handles.append(submit.handle)
        return handles

    def forget(self, handles: Iterable[int]) -> None:
        """Nobody wants to hear of these grants any more."""
        for handle in handles:
            self._granted.pop(handle, None)

    def abort(self, handles: Iterable[int]) -> None:
        """Nobody waits for these any more; those that have ended are left alone."""
        for handle in handles:
            if self._open.pop(handle, None) is not None:
                self._pending.abort_handles.append(handle)
                self._wake.set()

    def give_up(self, why: str) -> None:
        """Nothing more is expected of what is open: it ends with UNAVAILABLE, and the worker should drop it."""
        self._pending.abort_handles.extend(self._open)
        self._wake.set()
        self._end_all(why)

    async def run(
        self,
        stub: "WorkerServiceAsyncStub",
        router_id: str,
        on_open: Callable[[SessionWelcome], None],
        metadata: Metadata = (),
    ) -> None:
        """Talks to the worker until the stream breaks; then every open choice ends with UNAVAILABLE. Raises FalseClaim
        where what the worker says cannot be true, beyond what a bug with single requests would explain."""
        call = stub.Session(metadata=metadata)
        welcomed = asyncio.Event()
        writing = asyncio.create_task(self._write(call, router_id, welcomed))
        try:
            async for response in call:
                if response.HasField("welcome"):
                    if welcomed.is_set():
                        raise FalseClaim("the worker opens its session twice")
                    self.number = response.welcome.session
                    on_open(response.welcome)
                    welcomed.set()
                outputs = response.outputs
                if len(outputs) <= FEW_OUTPUTS:
                    for output in outputs:
                        self._hand_out(output)
                else:
                    await self._hand_out_in_pieces(outputs)
        finally:
            writing.cancel()
            call.cancel()
            self._break()

    async def _hand_out_in_pieces(self, outputs: Sequence[SequenceOutput]) -> None:
        for start in range(0, len(outputs), FEW_OUTPUTS):
            for output in outputs[start : start + FEW_OUTPUTS]:
                self._hand_out(output)
            await asyncio.sleep(0)

    def _hand_out(self, output: SequenceOutput) -> None:
        """Raises FalseClaim."""
        handle = output.handle
        taker = self._open.get(handle)
        if taker is None:
            if not 0 < handle <= self._next_handle:
                raise FalseClaim(f"the worker answers what it was never sent: handle {handle}")
            if output.HasField("granted"):
                self._hear_of_grant(handle, output.granted)
            elif not output.HasField("error"):
                self.num_news += 1  # aborted meanwhile
            return
        is_error = output.HasField("error")
        chunk: OutputChunk = output.chunk
        expected = taker.expected
        problem = end_problem(output, expected) if is_error else output_problem(output, chunk, expected)
        if problem is not None:
            self.abort([handle])
            _tell(taker.sink, _lost(handle, f"the worker's answer makes no sense: {problem}"))
            self._count_false(problem)
            return
        self.num_news += not is_error
        if ended := is_error or chunk.finish_reason:
            del self._open[handle]
            self._num_ended += 1
        follows = _tell(taker.sink, output)
        if follows is False:
            self._count_false("output does not follow what came before")
        if not follows and not ended:
            self.abort([handle])

    def _hear_of_grant(self, handle: int, report: GrantReport) -> None:
        taker = self._granted.get(handle)
        if taker is None:
            return
        problem = report_problem(report, prompt_tokens=taker.prompt_tokens, most_tokens=taker.most_tokens)
        if problem is not None:
            # Of the request's other choices it is not believed either.
            self.forget([other for other, each in self._granted.items() if each.sink == taker.sink])
            _tell(taker.sink, handle, None)
            self._count_false(problem)
            return
        if report.ended:
            del self._granted[handle]
        _tell(taker.sink, handle, report)

    def _count_false(self, problem: str) -> None:
        """Raises FalseClaim where it is one too many."""
        self._num_false += 1
        self._num_ended += 1
        if self._num_false >= FALSE_ANSWERS and self._num_false > FALSE_SHARE * self._num_ended:
            raise FalseClaim(f"the worker's answers make no sense: {problem}")

    def _expected(self, submit: Submit) -> Expected:
        return Expected(
            submit.choice,
            self._most_output(submit) - len(submit.resume.output_token_ids),
            len(submit.prompt_token_ids),
            self._vocab_size,
            submit.suspect,
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
        self._end_all(LOST)
        granted, self._granted = self._granted, {}
        for handle, taker in granted.items():
            _tell(taker.sink, handle, None)

    def _end_all(self, why: str) -> None:
        takers, self._open = self._open, {}
        for handle, taker in takers.items():
            _tell(taker.sink, _lost(handle, why))


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


def _tell(hear: Callable[..., object], *news: object) -> bool | None:
    """Whether it took the news; None where it raised: one request's bug must not end the session that others share."""
    try:
        return hear(*news) is not False
    except Exception as error:
        get_logger().error("unexpected error", exc_info=error)
        return None


def _lost(handle: int, why: str) -> SequenceOutput:
    return SequenceOutput(handle=handle, error=no_worker(why).to_proto())
