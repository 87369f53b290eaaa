"""One router's stream: submits and aborts in, the news of each step out."""

import asyncio
from collections.abc import AsyncIterator

from trunkline.status import CODE_INTERNAL, INTERNAL, RequestRefused, invalid
from trunkline.v1.worker_pb2 import SequenceOutput, SessionRequest, SessionResponse, SessionWelcome, Submit
from trunkline_runtime.channel import MAX_MESSAGE_BYTES
from trunkline_runtime.log import get_logger
from trunkline_worker.front import Choice, Front

MAX_RESPONSE_BYTES = MAX_MESSAGE_BYTES // 4  # of outputs in one message; a single output is bounded by validation


class Outbox:
    """News that wait to be sent. A step's news arrive together and leave in one message; while the reader is slow,
    those of several steps share one. What waits is bounded by the max_tokens of the requests themselves.
    """

    def __init__(self) -> None:
        self._outputs: list[SequenceOutput] = []
        self._wake = asyncio.Event()

    def put(self, output: SequenceOutput) -> None:
        self._outputs.append(output)
        self._wake.set()

    async def take(self) -> list[SequenceOutput]:
        """Everything that waits; at least one."""
        while not self._outputs:
            self._wake.clear()
            await self._wake.wait()
        size = count = 0
        for output in self._outputs:
            size += output.ByteSize()
            if count and size > MAX_RESPONSE_BYTES:
                break
            count += 1
        taken, self._outputs = self._outputs[:count], self._outputs[count:]
        return taken


class Session:
    """See the module. Its choices are aborted when it is closed."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._outbox = Outbox()
        self._choices: dict[int, Choice] = {}  # by the router's handle

    def take(self, request: SessionRequest) -> None:
        """What the router says."""
        for submit in request.submits:
            try:
                self._submit(submit)
            except RequestRefused as refused:
                self._outbox.put(SequenceOutput(handle=submit.handle, error=refused.to_proto()))
            except Exception as error:  # a bug must cost this choice only, not the router's whole session
                get_logger().error("unexpected error", request_id=submit.request_id, exc_info=error)
                broken = RequestRefused(CODE_INTERNAL, INTERNAL, "an internal error; see the worker's log")
                self._outbox.put(SequenceOutput(handle=submit.handle, error=broken.to_proto()))
        for handle in request.abort_handles:
            choice = self._choices.pop(handle, None)
            if choice is not None:
                self._front.cancel(choice)

    async def responses(self) -> AsyncIterator[SessionResponse]:
        """What the router is told: who answers, then the news."""
        model = self._front.model
        yield SessionResponse(welcome=SessionWelcome(worker_id=model.worker_id, epoch=model.epoch))
        while True:
            yield SessionResponse(outputs=await self._outbox.take())

    def close(self) -> None:
        """Nobody listens any more."""
        for choice in self._choices.values():
            self._front.cancel(choice)
        self._choices.clear()

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
