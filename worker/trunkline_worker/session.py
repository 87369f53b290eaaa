"""One router's stream: submits and aborts in, the news of each step out."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from trunkline.channel import MAX_MESSAGE_BYTES
from trunkline.status import (
    CODE_INTERNAL,
    CODE_RESOURCE_EXHAUSTED,
    INTERNAL,
    OVERLOADED,
    RequestRefused,
    invalid,
)
from trunkline.v1.worker_pb2 import SequenceOutput, SessionRequest, SessionResponse, SessionWelcome, Submit
from trunkline_runtime.log import get_logger
from trunkline_worker.front import Choice, Front

# A router reads as fast as it can and keeps what its own clients leave; one for which this much waits stands still.
MAX_WAITING_BYTES = 4 * MAX_MESSAGE_BYTES
LONG_LEDGER_TOKENS = 256  # takes a millisecond or so
MAX_RESPONSE_BYTES = MAX_MESSAGE_BYTES // 4  # of outputs in one message; a single output is bounded by validation


class Outbox:
    """News that wait to be sent. A step's news arrive together and leave in one message; while the reader is slow,
    those of several steps share one. Past MAX_WAITING_BYTES the reader is given up: `on_overflow` is called, once, what
    waits is dropped, and so is whatever is put in later.
    """

    def __init__(self, on_overflow: Callable[[], None]) -> None:
        self._on_overflow = on_overflow
        self._waiting: deque[tuple[SequenceOutput, int]] = deque()  # with its bytes
        self._waiting_bytes = 0
        self._overflowed = False
        self._wake = asyncio.Event()

    def put(self, output: SequenceOutput) -> None:
        if self._overflowed:
            return
        size = output.ByteSize()
        self._waiting.append((output, size))
        self._waiting_bytes += size
        self._wake.set()
        # A single output may be larger: it is bounded by validation.
        if self._waiting_bytes > MAX_WAITING_BYTES and len(self._waiting) > 1:
            self._overflowed = True
            self._waiting.clear()
            self._on_overflow()

    async def take(self) -> list[SequenceOutput]:
        """Everything that waits and fits into a message; at least one. Raises RequestRefused once the reader was given
        up."""
        while not self._waiting:
            if self._overflowed:
                raise RequestRefused(
                    CODE_RESOURCE_EXHAUSTED,
                    OVERLOADED,
                    f"the output is read too slowly: more than {MAX_WAITING_BYTES} bytes of it waited",
                )
            self._wake.clear()
            await self._wake.wait()
        taken: list[SequenceOutput] = []
        total = 0
        while self._waiting:
            output, size = self._waiting[0]
            if taken and total + size > MAX_RESPONSE_BYTES:
                break
            self._waiting.popleft()
            self._waiting_bytes -= size
            total += size
            taken.append(output)
        return taken


class Session:
    """See the module. Its choices are aborted when it is closed."""

    def __init__(self, front: Front, on_stalled: Callable[[], object]) -> None:
        """`on_stalled` is called when the router does not read what it is told; the session is over then."""
        self._front = front
        self._on_stalled = on_stalled
        self._outbox = Outbox(self._give_up)
        self._choices: dict[int, Choice] = {}  # by the router's handle

    async def take(self, request: SessionRequest) -> None:
        """What the router says. Others get their turn between long ledgers, whose text is made anew."""
        for submit in request.submits:
            try:
                self._submit(submit)
            except RequestRefused as refused:
                self._outbox.put(SequenceOutput(handle=submit.handle, error=refused.to_proto()))
            except Exception as error:  # a bug must cost this choice only, not the router's whole session
                get_logger().error("unexpected error", request_id=submit.request_id, exc_info=error)
                broken = RequestRefused(CODE_INTERNAL, INTERNAL, "an internal error; see the worker's log")
                self._outbox.put(SequenceOutput(handle=submit.handle, error=broken.to_proto()))
            if len(submit.resume.output_token_ids) > LONG_LEDGER_TOKENS:
                await asyncio.sleep(0)
        for handle in request.abort_handles:
            choice = self._choices.pop(handle, None)
            if choice is not None:
                self._front.cancel(choice)

    def tell(self, output: SequenceOutput) -> None:
        """News of something that did not come by this session."""
        self._outbox.put(output)

    async def responses(self, number: int) -> AsyncIterator[SessionResponse]:
        """What the router is told: who answers, and which of its sessions this is; then the news."""
        model = self._front.model
        yield SessionResponse(welcome=SessionWelcome(worker_id=model.worker_id, epoch=model.epoch, session=number))
        while True:
            yield SessionResponse(outputs=await self._outbox.take())

    def close(self) -> None:
        """Nobody listens any more."""
        for choice in self._choices.values():
            self._front.cancel(choice)
        self._choices.clear()

    def _give_up(self) -> None:
        get_logger().error("a router does not read: its session ends", choices=len(self._choices))
        self.close()
        self._on_stalled()

    def _submit(self, submit: Submit) -> None:
        if submit.handle in self._choices:
            raise invalid("handle", f"{submit.handle} names an unfinished choice of this session")
        choice = self._front.submit(submit, self._deliver)
        if choice is not None:
            self._choices[submit.handle] = choice

    def _deliver(self, output: SequenceOutput) -> None:
        if output.HasField("error") or output.chunk.finish_reason:
            self._choices.pop(output.handle, None)
        self._outbox.put(output)
