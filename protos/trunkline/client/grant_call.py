"""A direct client's side of a Grant call: the messages to its router and the router's answers."""

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Any

import grpc

from trunkline.client.direct_answer import DirectAnswer
from trunkline.client.worker_streams import Lost
from trunkline.errors import DeadlineExceeded, NoWorker, TrunklineError, error_of
from trunkline.status import FORBIDDEN, OVERLOADED
from trunkline.v1.generation_pb2 import RequestError
from trunkline.v1.inference_pb2 import DirectLost, DirectStarted, GenerateRequest, GrantRequest, GrantResponse

FAREWELL_S = 1.0  # time for the router to receive the end of the call
# Time that a worker may be silent while its router does not explain the silence: longer than a router takes to find
# another worker.
UNANSWERED_S = 120.0
# The refusal reported for a worker whose grants were not used: it did not fail, and may be granted again at once.
UNUSED = RequestError(reason=OVERLOADED, retry_delay_ms=1)

Answered = asyncio.Future[GrantResponse | Exception]


class NotOffered(Exception):
    """The router gives no grants. The request has not been started.

    is_lasting: whether the router refuses every request, rather than this one
    """

    def __init__(self, why: str, *, is_lasting: bool) -> None:
        super().__init__(why)
        self.is_lasting = is_lasting


class _UnsentMessage(NoWorker):
    """The call ended before a message could be sent."""


@dataclass(frozen=True, slots=True)
class _Said:
    """A message to the router.  answered: receives the router's answer; None: the message has no answer"""

    message: GrantRequest
    answered: Answered | None = None


@dataclass(frozen=True, slots=True)
class _Question:
    """A `silent` message to the router."""

    claims: DirectLost
    answered: Answered


class GrantCall:
    """One request's Grant call; close() it. Messages are exchanged in the background, one after the other, so that
    problems of the router do not disturb a worker's stream. Only a request without a worker waits for its router."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._outbox: asyncio.Queue[_Said | None] = asyncio.Queue()  # None: no more messages
        self._question: _Question | None = None  # the last one, until its answer is used
        # The router has granted another worker, in answer to a question that was forgotten by then.
        self._is_elsewhere = False
        self._talking = asyncio.create_task(self._talk())

    async def first(self, request: GenerateRequest) -> GrantResponse:
        """Sends the request; returns its grants. Raises NotOffered and TrunklineError."""
        try:
            return await self._ask(GrantRequest(request=request))
        except _UnsentMessage as error:
            # The router refused without reading the request. The reason is not known here; the routed request gets it.
            raise NotOffered(str(error), is_lasting=False) from None
        except grpc.aio.AioRpcError as error:
            refused = error_of(error)
            if error.code() is grpc.StatusCode.UNIMPLEMENTED or refused.reason == FORBIDDEN:
                raise NotOffered(str(refused), is_lasting=True) from None
            raise refused from None

    async def lost(self, answer: DirectAnswer, lost: Lost) -> GrantResponse:
        """Returns grants for another worker, as soon as the router finds one. Raises TrunklineError."""
        claims = answer.claims()
        try:
            if self._question is not None and self._question.claims == claims:
                # The router's answer to the earlier question about the silence may serve here too.
                granted = _granted(await self._question.answered)
                self._question = None
                if not granted.wait:
                    return granted
            self._forget_question()
            return await self._ask(GrantRequest(lost=answer.claims(lost.refusal)))
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from lost

    async def silent(self, answer: DirectAnswer) -> None:
        """Asks the router about a worker's silence, and returns if the worker is working. If the router does not answer
        because it is gone or hangs, waits until it is cancelled, which the caller does when the worker sends output, or
        raises NoWorker after UNANSWERED_S. Raises Lost if another worker is to continue, and TrunklineError."""
        try:
            async with asyncio.timeout(UNANSWERED_S):
                await self._explained(answer)
        except TimeoutError:
            raise NoWorker(f"neither the worker nor the router has said anything for {UNANSWERED_S:g} s") from None

    async def _explained(self, answer: DirectAnswer) -> None:
        claims = answer.claims()
        if self._question is None or self._question.claims != claims:
            self._forget_question()
            self._question = _Question(claims, self._say(GrantRequest(silent=claims)))
        answered = await asyncio.shield(self._question.answered)
        if isinstance(answered, GrantResponse):
            if not answered.wait:
                raise Lost("the worker hangs")  # the question's answer has grants for another one
            self._question = None
            return
        if isinstance(answered, grpc.aio.AioRpcError) and (refused := error_of(answered)).reason:
            raise refused
        await asyncio.get_running_loop().create_future()  # the call has ended, and the worker may be well

    def started(self) -> None:
        """Tells the router that the first output has arrived."""
        self._outbox.put_nowait(_Said(GrantRequest(started=DirectStarted())))

    def end(self) -> None:
        """Tells the router that the answer is complete, so that it settles the request's load and quotas."""
        self._outbox.put_nowait(None)

    async def farewell(self) -> None:
        """Waits FAREWELL_S at most for the router to settle: cancelling a call can overtake its last messages."""
        await asyncio.wait({self._talking}, timeout=FAREWELL_S)

    async def close(self) -> None:
        self._call.cancel()
        self._talking.cancel()
        await asyncio.gather(self._talking, return_exceptions=True)

    async def _ask(self, message: GrantRequest) -> GrantResponse:
        """Sends a message; returns the router's answer. Raises AioRpcError and TrunklineError."""
        return _granted(await self._say(message))

    def _say(self, message: GrantRequest) -> Answered:
        answered: Answered = asyncio.get_running_loop().create_future()
        self._outbox.put_nowait(_Said(message, answered))
        return answered

    def _forget_question(self) -> None:
        """Drops a question whose claims are out of date."""
        question, self._question = self._question, None
        if question is None:
            return
        if not question.answered.done():
            question.answered.cancel()
        elif _moves(question.answered.result()):
            self._is_elsewhere = True

    async def _talk(self) -> None:
        while (said := await self._outbox.get()) is not None:
            if said.answered is not None and said.answered.cancelled():
                continue  # the question was forgotten before it was sent
            message = said.message
            if self._is_elsewhere and said.answered is not None:
                claims = message.lost if message.HasField("lost") else message.silent
                message = GrantRequest(lost=DirectLost(ledgers=claims.ledgers, prompt_known=claims.prompt_known))
                message.lost.refusal.CopyFrom(UNUSED)
            answer = await self._exchange(message, wants_answer=said.answered is not None)
            if said.answered is None or answer is None:
                continue
            if not said.answered.done():
                self._is_elsewhere = False
                said.answered.set_result(answer)
            elif _moves(answer):
                self._is_elsewhere = True
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the router is no longer needed
            await self._call.done_writing()
            await self._call.read()

    async def _exchange(self, message: GrantRequest, *, wants_answer: bool) -> GrantResponse | Exception | None:
        try:
            # read() reports why the call ended.
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await self._call.write(message)
            answer = await self._call.read() if wants_answer else None
        except Exception as error:  # every error is the answer to the message
            return self._unsent() if _hides_status(error) else error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return TrunklineError("the client was closed")  # which closed the channel
        if answer is grpc.aio.EOF:
            return NoWorker("the router has ended the call")
        granted: GrantResponse | None = answer
        return granted

    def _unsent(self) -> TrunklineError:
        """The likely error of a call that ended before a message was sent."""
        if self._call.time_remaining() == 0:
            return DeadlineExceeded("the deadline passed before the router was asked")
        return _UnsentMessage("the router has ended the call")


def _hides_status(error: Exception) -> bool:
    """Whether grpc.aio has replaced the call's status by its own error. It does so if a message is written while the
    call ends: https://github.com/grpc/grpc/issues/36066."""
    return isinstance(error, grpc.aio.AioRpcError) and error.details() == "Internal error from Core"


def _granted(answer: GrantResponse | Exception) -> GrantResponse:
    """Returns the grants. Raises the answer if it is an error."""
    if isinstance(answer, Exception):
        raise answer
    return answer


def _moves(answer: GrantResponse | Exception) -> bool:
    """Whether the router has granted another worker."""
    return isinstance(answer, GrantResponse) and not answer.wait
