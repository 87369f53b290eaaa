"""One router's stream: it receives submits and aborts, and sends the outputs of each step."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable

from google.protobuf.message import DecodeError

from trunkline.capabilities import GRAMMARS, unable
from trunkline.channel import MAX_MESSAGE_BYTES
from trunkline.status import CODE_RESOURCE_EXHAUSTED, OVERLOADED, RequestRefused, internal, invalid
from trunkline.v1.worker_pb2 import SequenceOutput, SessionRequest, SessionResponse, SessionWelcome, Submit
from trunkline.validation import MAX_GRAMMAR_BYTES
from trunkline_runtime.log import get_logger
from trunkline_runtime.wire import NotAMessage, fields, parts
from trunkline_worker.front.choice import Choice
from trunkline_worker.front.front import Front
from trunkline_worker.front.session_grammars import SessionGrammars
from trunkline_worker.front.submit_size import OTHER_BYTES, check_submit, most_submit_bytes

# A router reads at full speed and buffers for its own slow clients. One with this much waiting has stalled.
MAX_WAITING_BYTES = 4 * MAX_MESSAGE_BYTES
MAX_ALL_WAITING_BYTES = 2 * MAX_WAITING_BYTES  # of all readers: above it, the one furthest behind is given up
MAX_RESPONSE_BYTES = 256 << 10  # of outputs in one message; a single output is bounded by validation
OUTPUT_BYTES = 256  # memory of an output on top of its bytes on the wire
ROOM_BYTES = 4 << 20  # while more waits, the reader's requests are not read, so that it is sent no more refusals
# Largest part of a message parsed at once; takes about a millisecond at worst. A longer submit is parsed by itself.
PART_BYTES = 16 << 10
# Pause after a message, so that answers to many aborts share one. Shorter than a step.
REST_S = 0.002
TURN_S = 0.001  # time spent on a router's message before other tasks get a turn
MAX_SUBMITS = 1 << 16  # in one message
MAX_ABORT_BYTES = 1 << 20  # of handles in one message
MAX_NAME_CHARACTERS = 512
_SUBMITS, _GRAMMARS = SessionRequest.SUBMITS_FIELD_NUMBER, SessionRequest.GRAMMARS_FIELD_NUMBER


class Backlog:
    """Counts the bytes that wait in all outboxes, and bounds their sum."""

    def __init__(self) -> None:
        self._waiting: dict[Outbox, int] = {}  # bytes, of non-empty outboxes
        self.all_bytes = 0  # others only read it

    def change(self, outbox: "Outbox", by_bytes: int) -> None:
        """Changes an outbox's waiting bytes. If the sum of all exceeds its bound, gives up the fullest outbox."""
        self.all_bytes += by_bytes
        waiting = self._waiting[outbox] = self._waiting.get(outbox, 0) + by_bytes
        if not waiting:
            del self._waiting[outbox]
        if self.all_bytes > MAX_ALL_WAITING_BYTES:
            max(self._waiting, key=self._waiting.__getitem__).give_up()


class Outbox:
    """Queues outputs for one reader. A step's outputs are sent in one message; while the reader is slow, outputs of
    several steps share one. Above MAX_WAITING_BYTES the reader is given up: `on_overflow` is called once, and waiting
    and later outputs are dropped.
    """

    def __init__(self, on_overflow: Callable[[], None], backlog: Backlog | None = None) -> None:
        self._on_overflow = on_overflow
        self._backlog = backlog or Backlog()
        self._waiting: deque[tuple[SequenceOutput, int]] = deque()  # with their bytes
        self._waiting_bytes = 0
        self._ended: RequestRefused | None = None
        self._wake = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()

    def put(self, output: SequenceOutput) -> None:
        if self._ended is not None:
            return
        size = output.ByteSize() + OUTPUT_BYTES
        self._waiting.append((output, size))
        self._wake.set()
        self._grow(size)
        # A single output may exceed the limit: it is bounded by validation.
        if self._waiting_bytes > MAX_WAITING_BYTES and len(self._waiting) > 1:
            self.give_up()

    def give_up(self) -> None:
        """Ends the outbox because its reader has stalled."""
        if self._ended is None:
            message = f"the output is read too slowly: {self._waiting_bytes} bytes of it waited"
            self.end(RequestRefused(CODE_RESOURCE_EXHAUSTED, OVERLOADED, message))
            self._on_overflow()

    def end(self, refused: RequestRefused) -> None:
        """Drops all outputs, waiting and later ones. take() raises `refused` from now on."""
        self._ended = refused
        self.close()

    def close(self) -> None:
        """Drops the waiting outputs."""
        self._waiting.clear()
        self._grow(-self._waiting_bytes)
        self._wake.set()

    async def room(self) -> None:
        """Waits until the reader has caught up or was given up."""
        await self._has_room.wait()

    async def take(self) -> list[SequenceOutput]:
        """Waits for outputs, and returns as many as fit into one message, at least one. Raises the RequestRefused of
        end() once it was called."""
        while not self._waiting:
            if self._ended is not None:
                raise self._ended
            self._wake.clear()
            await self._wake.wait()
        taken: list[SequenceOutput] = []
        total = 0
        while self._waiting:
            output, size = self._waiting[0]
            if taken and total + size > MAX_RESPONSE_BYTES:
                break
            self._waiting.popleft()
            total += size
            taken.append(output)
        self._grow(-total)
        return taken

    def _grow(self, by_bytes: int) -> None:
        if not by_bytes:
            return
        self._waiting_bytes += by_bytes
        if self._waiting_bytes > ROOM_BYTES:
            self._has_room.clear()
        else:
            self._has_room.set()
        self._backlog.change(self, by_bytes)


class Session:
    """The choices that one router submits on its stream. close() aborts those that have not ended."""

    def __init__(self, front: Front, on_stalled: Callable[[], object], backlog: Backlog | None = None) -> None:
        """`on_stalled` is called when the router does not read its outputs; the session has then ended."""
        self._front = front
        self._on_stalled = on_stalled
        self._outbox = Outbox(self._give_up, backlog)
        self._most_submit_bytes = most_submit_bytes(front.model)
        self._grammars = SessionGrammars(front.model.max_session_grammar_bytes)
        self._choices: dict[int, Choice] = {}  # by the router's handle

    async def take(self, raw: bytes) -> None:
        """Takes a serialized SessionRequest. It is parsed and processed piece by piece, and other tasks run in between.
        Raises RequestRefused if the message is invalid; the caller then ends the session."""
        try:
            await self._take(raw)
        except (DecodeError, NotAMessage) as error:
            raise invalid("request", f"{len(raw)} bytes are not a message of Session: {error}") from None

    async def _take(self, raw: bytes) -> None:
        begun_s, num_submits, abort_bytes = time.perf_counter(), 0, 0
        for part in parts(raw, PART_BYTES):
            if len(part) > PART_BYTES:
                abort_bytes += self._check_part(part)
                if abort_bytes > MAX_ABORT_BYTES:
                    raise invalid("abort_handles", f"are more than {MAX_ABORT_BYTES} bytes")
            request = SessionRequest.FromString(part)
            if request.HasField("hello"):
                get_logger().info("session opened", router=request.hello.router_id[:MAX_NAME_CHARACTERS])
            if request.grammars or request.dropped_grammars:
                self._take_grammars(request)
            num_submits += len(request.submits)
            if num_submits > MAX_SUBMITS:
                raise invalid("submits", f"there are more than {MAX_SUBMITS} in one message")
            for submit in request.submits:
                self._start(submit)
                if time.perf_counter() - begun_s > TURN_S:
                    begun_s = await self._yield_turn()
            for handle in request.abort_handles:
                self._abort(handle)
                if time.perf_counter() - begun_s > TURN_S:
                    begun_s = await self._yield_turn()
            if time.perf_counter() - begun_s > TURN_S:
                begun_s = await self._yield_turn()

    def _take_grammars(self, request: SessionRequest) -> None:
        if not self._front.capabilities.can(GRAMMARS):
            raise unable(GRAMMARS, "this worker does not have")
        for digest in request.dropped_grammars:
            self._grammars.drop(digest)
        for grammar in request.grammars:
            self._grammars.keep(grammar)

    async def _yield_turn(self) -> float:
        """Lets other tasks run, and waits while the router does not read its outputs. Returns the time."""
        await asyncio.sleep(0)
        await self._outbox.room()
        return time.perf_counter()

    def _check_part(self, part: bytes) -> int:
        """Checks a part with a single field, before it is parsed. Returns the field's bytes, or 0 for a submit or a
        grammar. Raises RequestRefused or NotAMessage."""
        ((number, _, at, end),) = fields(part)
        if number == _GRAMMARS and end - at <= MAX_GRAMMAR_BYTES + OTHER_BYTES:
            return 0
        if number != _SUBMITS:
            return end - at
        check_submit(part, at, end, self._most_submit_bytes)
        return 0

    def tell(self, output: SequenceOutput) -> None:
        """Sends an output of a choice that was not submitted on this session."""
        self._outbox.put(output)

    async def responses(self, number: int) -> AsyncIterator[SessionResponse]:
        """Yields the welcome, with the worker's identity and this session's number, then the outputs."""
        model = self._front.model
        yield SessionResponse(welcome=SessionWelcome(worker_id=model.worker_id, epoch=model.epoch, session=number))
        while True:
            yield SessionResponse(outputs=await self._outbox.take())
            await asyncio.sleep(REST_S)

    def refuse(self, refused: RequestRefused) -> None:
        """Aborts all choices and ends the session with this error."""
        self._abort_all()
        self._outbox.end(refused)

    def close(self) -> None:
        """Aborts all choices and drops waiting outputs."""
        self._abort_all()
        self._outbox.close()

    def _abort_all(self) -> None:
        for choice in self._choices.values():
            self._front.cancel(choice)
        self._choices.clear()

    def _give_up(self) -> None:
        get_logger().error("session ended: the router does not read its outputs", choices=len(self._choices))
        self._abort_all()
        self._on_stalled()

    def _start(self, submit: Submit) -> None:
        """Starts a choice. If it cannot be started, sends the error to the router."""
        try:
            self._submit(submit)
        except RequestRefused as refused:
            self._outbox.put(SequenceOutput(handle=submit.handle, error=refused.to_proto()))
        except Exception as error:  # a bug must end this choice only, not the whole session
            get_logger().error("unexpected error", request_id=submit.request_id, exc_info=error)
            broken = internal(submit.request_id).to_proto()
            self._outbox.put(SequenceOutput(handle=submit.handle, error=broken))

    def _abort(self, handle: int) -> None:
        choice = self._choices.pop(handle, None)
        if choice is None:
            return
        self._front.cancel(choice)
        if choice.ended is not None:
            self._outbox.put(SequenceOutput(handle=handle, timeline=choice.ended))

    def _submit(self, submit: Submit) -> None:
        if submit.handle in self._choices:
            raise invalid("handle", f"{submit.handle} names an unfinished choice of this session")
        self._grammars.complete(submit)
        choice = self._front.submit(submit, self._deliver)
        if choice is not None:
            self._choices[submit.handle] = choice

    def _deliver(self, output: SequenceOutput) -> None:
        if output.HasField("timeline"):  # its last one
            self._choices.pop(output.handle, None)
        self._outbox.put(output)
