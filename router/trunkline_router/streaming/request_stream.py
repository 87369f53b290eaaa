"""One request's news, on their way from its workers to the client.

News that the client has not taken yet merge, so a slow client never holds a session back; nor does a router that is
behind, see Fanout. They leave in responses that any gRPC client takes. What merges is bounded: a client that falls too
far behind its output loses its request, before others lose their memory.

A worker that breaks off ends an attempt, not the stream: what it has said is in the ledgers, and the next attempt goes
on from there.
"""

import asyncio
from typing import Protocol

from trunkline.answer_ledger import AnswerLedger
from trunkline.ledger import OutOfOrder
from trunkline.status import (
    CODE_INTERNAL,
    CODE_RESOURCE_EXHAUSTED,
    DEADLINE_EXCEEDED,
    INTERNAL,
    OVERLOADED,
    RequestRefused,
    no_worker,
)
from trunkline.v1.generation_pb2 import PromptReport
from trunkline.v1.inference_pb2 import GenerateResponse, PromptInfo
from trunkline.v1.worker_pb2 import SequenceOutput
from trunkline_router.quotas.meter import OutputMeter
from trunkline_router.streaming.backlog import Backlog
from trunkline_router.streaming.client_buffer import ClientBuffer
from trunkline_router.streaming.fanout import Fanout
from trunkline_runtime.log import get_logger

MAX_PROMPT_BYTES = 512 << 10  # of a prompt's report that goes with output: a larger one is a response by itself
MAX_LEDGER_BYTES = 4 << 20  # of one request's choices: a million tokens. Past it the request stays with its worker.
COME_BACK_MS = 1000


class BrokenOff(Exception):
    """A worker ended an attempt before its answer was complete. `refused` says why, in the error table's words.

    `suspect`, `sole_suspect`: see SequenceOutput; of any of the request's choices.
    """

    def __init__(self, refused: RequestRefused, *, suspect: bool = False, sole_suspect: bool = False) -> None:
        super().__init__(refused.message)
        self.refused = refused
        self.suspect = suspect
        self.sole_suspect = sole_suspect


class Attempt(Protocol):
    """A worker's try at an answer, as far as its stream tells it."""

    is_watched: bool  # it is told how far it has come

    def gave_up(self) -> None:
        """The client has let too much wait: the request ends now, and the worker should know at once, not only when the
        client reads on."""
        ...

    def broke_off(self) -> None:
        """The worker has given it up: likewise."""
        ...

    def progressed(self, steps: int) -> None:
        """So many tokens it has brought each choice, on average."""
        ...


class RequestStream:
    """`prompt` is filled in by the first choice's report; until it is there, nothing goes out."""

    def __init__(
        self,
        request_id: str,
        choices: int,
        prompt: PromptInfo,
        fanout: Fanout | None = None,
        backlog: Backlog | None = None,
        meter: OutputMeter | None = None,
        *,
        max_ledger_bytes: int = MAX_LEDGER_BYTES,
    ) -> None:
        self._request_id = request_id
        self._prompt = prompt
        self._prompt_sent = False
        self._client_buffer = ClientBuffer(backlog or Backlog(), self.fall_behind)
        self._refused: RequestRefused | None = None
        self._broken: BrokenOff | None = None
        self._fanout = fanout or Fanout()
        self._meter = meter or OutputMeter()
        self._due = asyncio.Event()  # what is there may be taken
        self.answer = AnswerLedger(choices, max_ledger_bytes)
        self._attempt: Attempt | None = None  # the present one, or the last
        self._is_watched = False
        self._attempt_tokens = 0  # of a watched one
        self._attempt_choices = choices
        self._is_at_worker = False  # an attempt is, which was not lost or refused
        self.resumptions = 0

    @property
    def cached_tokens(self) -> int:
        return self._prompt.cached_tokens

    @property
    def is_owed(self) -> bool:
        """Whether a worker computes or has computed anything of it, prompt included, as far as is known here. What all
        workers have lost or refused before its first token is nobody's to pay; what the client gave up is."""
        return self._is_at_worker or self.answer.has_output

    @property
    def has_ended(self) -> bool:
        """Whether every choice came to its end."""
        return not self.answer.num_unfinished

    def begin(self, worker_id: str, attempt: Attempt) -> None:
        """Another attempt begins, at this worker."""
        self._attempt, self._is_watched = attempt, attempt.is_watched
        if not self._prompt_sent:
            self._prompt.worker_id = worker_id
        self._broken = None
        self._is_at_worker = True
        self._attempt_tokens = 0
        self._attempt_choices = self.answer.num_unfinished

    def put(self, output: SequenceOutput) -> bool:
        """News of one choice; False where they do not follow what came before. Raises nothing: whoever brings them has
        other requests' news too."""
        if self._refused is not None:
            return True
        try:
            if output.HasField("error"):
                self._break_off(RequestRefused.from_proto(output.error), output)
                return True
            if self._broken is not None:
                return True  # of a choice whose sibling broke off: the next attempt computes it again
            chunk = output.chunk
            index = chunk.index
            answer = self.answer
            try:
                num_tokens = answer.add(chunk)
            except OutOfOrder as error:
                self._break_off(no_worker(f"the worker lost its place: {error}"), SequenceOutput())
                return False
            if not answer.prompt_known and index == 0:
                self._take_prompt(output.prompt)  # an empty one where the choice ended before it began
            self._meter.add(num_tokens)
            self._client_buffer.add(index, chunk)
            if self._is_watched and self._attempt is not None:
                self._attempt_tokens += num_tokens
                self._attempt.progressed(self._attempt_tokens // self._attempt_choices)
            if not self._due.is_set():
                self._announce()
        except Exception as error:  # a bug must cost this request only, not every one of the worker's session
            get_logger().error("unexpected error", request_id=self._request_id, exc_info=error)
            self._refuse(RequestRefused(CODE_INTERNAL, INTERNAL, "an internal error; the router's log has it"))
            if self._attempt is not None:
                self._attempt.broke_off()
        return True

    async def take(self) -> GenerateResponse | None:
        """What is new, as far as it goes into one response; None after the last one. Raises BrokenOff where a worker
        gave up, when all that it had said is taken; RequestRefused where the request is over. To ask again means that
        the response before has been written."""
        answer, client_buffer, due = self.answer, self._client_buffer, self._due
        client_buffer.left()
        while not ((has_news := answer.prompt_known and client_buffer.holds_any) and due.is_set()):
            if not has_news:
                if self._refused is not None:
                    raise self._refused
                if self._broken is not None:
                    raise self._broken
                if not (answer.num_unfinished or client_buffer.holds_any):
                    return None
            due.clear()
            await due.wait()
        response = GenerateResponse(request_id=self._request_id)
        if not self._prompt_sent:
            self._prompt_sent = True
            response.prompt.CopyFrom(self._prompt)
            if self._prompt.logprobs and self._prompt.ByteSize() > MAX_PROMPT_BYTES:
                return response
        response.chunks.extend(client_buffer.take())
        if client_buffer.holds_any:
            return response
        due.clear()
        if not answer.num_unfinished:
            response.usage.CopyFrom(answer.usage(self._prompt, self.resumptions))
        return response

    def _break_off(self, refused: RequestRefused, output: SequenceOutput) -> None:
        """The attempt is over. Of several choices' errors the first is told; any of them may be under suspicion."""
        if self._broken is None:
            self._broken = BrokenOff(refused)
            self._is_at_worker = output.begun and refused.reason == DEADLINE_EXCEEDED  # the client's
            if self._attempt is not None:
                self._attempt.broke_off()
        self._broken.suspect |= output.suspect
        self._broken.sole_suspect |= output.sole_suspect
        self._announce()

    def _announce(self) -> None:
        if self._prompt_sent and self.answer.num_unfinished:
            self._fanout.has_news(self._due)
        else:  # the client waits for the first response, and nothing more merges with the last
            self._due.set()

    def _take_prompt(self, report: PromptReport) -> None:
        self.answer.prompt_known = True
        self._prompt.cached_tokens = report.cached_tokens
        self._prompt.logprobs.extend(report.logprobs)

    def fall_behind(self, why: str) -> None:
        """The client has let too much wait: it gets no more of it."""
        message = f"the client reads too slowly: {why}"
        self._refuse(RequestRefused(CODE_RESOURCE_EXHAUSTED, OVERLOADED, message, retry_delay_ms=COME_BACK_MS))
        if self._attempt is not None:
            self._attempt.gave_up()

    def _refuse(self, refused: RequestRefused) -> None:
        """The request is over, whatever is still to come."""
        self._refused = refused
        self.close()
        self._announce()

    def close(self) -> None:
        """The client reads no more: what is kept for it is dropped."""
        self._client_buffer.clear()
