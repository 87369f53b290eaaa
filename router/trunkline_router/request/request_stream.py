"""The stream of one request's output from its workers to the client.

Output that the client has not read is merged, so a slow client never blocks a session; neither does an overloaded
router (see Fanout). Responses stay within the size limit of gRPC clients. Merged output is bounded: a client that falls
too far behind loses its request.

If a worker fails, only the attempt ends, not the stream. The ledgers contain all output so far, and the next attempt
continues after it.
"""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from trunkline.answer.answer_parser import AnswerParsers
from trunkline.ledger import AnswerLedger, OutOfOrder
from trunkline.status import (
    CODE_RESOURCE_EXHAUSTED,
    DEADLINE_EXCEEDED,
    OVERLOADED,
    RequestRefused,
    internal,
    no_worker,
)
from trunkline.v1.generation_pb2 import FinishReason, OutputChunk, PromptReport
from trunkline.v1.inference_pb2 import GenerateResponse, PromptInfo
from trunkline.v1.worker_pb2 import SequenceOutput, Submit
from trunkline.validation import WHOLE_OUTPUTS
from trunkline_router.quotas.reservation import OutputMeter
from trunkline_router.record.request_record import RequestRecord
from trunkline_router.request.client_buffer import Backlog, ClientBuffer
from trunkline_router.workers.output_claims import Sink, is_whole
from trunkline_runtime.log import get_logger

if TYPE_CHECKING:
    from trunkline_router.request.dispatch import WorkerAttempt

# Delay in multiples of a round's time, in which the transport writes and workers' output is read (bench/log.md).
REST_PER_ROUND = 3.0
MOST_REST_S = 0.02


class Fanout:
    """Schedules when the streams of an event loop write new output: at once when idle, in batches under load.

    Handing a token to its stream is ten times cheaper than sending a message to a client. So after a round, in which
    streams write, the next round is delayed in proportion to the time of the last one. Under load, rounds take a
    quarter of the time, and each message has the output of several steps. A round is not delayed if the event loop was
    idle for that time.
    """

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self._due: dict[asyncio.Event, None] = {}
        self._is_busy = False  # whether a round is scheduled or under way
        self._began_s = 0.0
        self._rest_until_s = 0.0

    def add(self, due: asyncio.Event) -> None:
        """Sets the stream's event in the next round."""
        self._due[due] = None
        if not self._is_busy:
            self._schedule()

    def _schedule(self) -> None:
        self._is_busy = True
        loop = asyncio.get_running_loop()
        rest_s = self._rest_until_s - self._clock_s()
        if rest_s > 0:
            loop.call_later(rest_s, self._round)
        else:
            loop.call_soon(self._round)

    def _round(self) -> None:
        # The tasks that are woken here run between _begin() and _end(), and write as much as flow control permits.
        loop = asyncio.get_running_loop()
        loop.call_soon(self._begin)
        due, self._due = self._due, {}
        for event in due:
            event.set()
        loop.call_soon(self._end)

    def _begin(self) -> None:
        self._began_s = self._clock_s()

    def _end(self) -> None:
        now_s = self._clock_s()
        self._rest_until_s = now_s + min(REST_PER_ROUND * (now_s - self._began_s), MOST_REST_S)
        self._is_busy = False
        if self._due:
            self._schedule()


STOP = FinishReason.FINISH_REASON_STOP  # once: the enum looks up each name that it is asked for
MAX_PROMPT_BYTES = 512 << 10  # a larger prompt report is sent as a response of its own
MAX_LEDGER_BYTES = 4 << 20  # of all choices: a million tokens. Beyond it, the request cannot change its worker.
COME_BACK_MS = 1000
STALL_S = 0.1  # a response that takes longer to write, while output waits, has a slow client


class BrokenOff(Exception):
    """A worker ended an attempt before its answer was complete. `refused` is the reason, an entry of the error table.

    `suspect` and `sole_suspect` are true if they are set in the SequenceOutput of any choice.
    """

    def __init__(self, refused: RequestRefused, *, suspect: bool = False, sole_suspect: bool = False) -> None:
        super().__init__(refused.message)
        self.refused = refused
        self.suspect = suspect
        self.sole_suspect = sole_suspect


class RequestStream:
    """The stream of one request. The first choice's report completes `prompt`; no response is sent before that.

    parsers: find the parts of the answer, as it is handed to the client; None: it is text
    """

    def __init__(
        self,
        record: RequestRecord,
        choices: int,
        prompt: PromptInfo,
        fanout: Fanout,
        backlog: Backlog,
        meter: OutputMeter,
        *,
        parsers: AnswerParsers | None = None,
    ) -> None:
        self._record = record
        self._prompt = prompt
        self._prompt_sent = False
        self._client_buffer = ClientBuffer(backlog, self.fall_behind)
        self._refused: RequestRefused | None = None
        self._broken: BrokenOff | None = None
        self._fanout = fanout
        self._meter = meter
        self._parsers = parsers
        self._due = asyncio.Event()  # set when the next response may be taken
        self.answer = AnswerLedger(choices, MAX_LEDGER_BYTES)
        self._attempt: WorkerAttempt | None = None  # the current or last one
        self._is_watched = False
        self._attempt_outputs = 0  # of a watched attempt: one for each step and choice
        self._attempt_choices = choices
        self._is_at_worker = False  # whether an attempt was begun and neither lost nor refused
        self.resumptions = 0
        self.handed_s = 0.0  # when the last response was handed on
        self._num_open = choices

    @property
    def cached_tokens(self) -> int:
        return self._prompt.cached_tokens

    @property
    def is_owed(self) -> bool:
        """Whether a worker is known to compute or to have computed any part of the request, including the prompt. A
        request that all workers lost or refused before the first token is not charged; one that its client cancelled
        is."""
        return self._is_at_worker or self.answer.has_output

    @property
    def has_ended(self) -> bool:
        """Whether every choice has ended."""
        return not self.answer.num_unfinished

    @property
    def num_untaken(self) -> int:
        """Vectors or scores that wait for the client."""
        return len(self._client_buffer.wholes)

    def begin(self, worker_id: str, attempt: "WorkerAttempt") -> None:
        """Begins another attempt, at this worker."""
        self._attempt, self._is_watched = attempt, attempt.is_watched
        if not self._prompt_sent:
            self._prompt.worker_id = worker_id
        self._broken = None
        self._is_at_worker = True
        self._attempt_outputs = 0
        self._attempt_choices = self.answer.num_unfinished

    def sink(self, submit: Submit) -> Sink:
        """Returns what takes the outputs of a choice, which is sent to the worker now."""
        if submit.work.output in WHOLE_OUTPUTS:
            prompt_tokens = len(submit.prompt_token_ids)
            self._meter.inputs.sent(submit.choice, prompt_tokens)
            return partial(self.put_whole, submit.choice, prompt_tokens)
        return self.put

    @property
    def is_broken(self) -> bool:
        """Whether the attempt has ended before the answer was complete, or the request has."""
        return self._broken is not None or self._refused is not None

    def put_whole(self, index: int, prompt_tokens: int, output: SequenceOutput) -> bool:
        """Takes output of one choice of a request for vectors or scores: the whole of it, unless the choice broke off.
        Each choice has a prompt of its own, with `prompt_tokens`."""
        if not is_whole(output):
            self.answer.prompt_known |= output.HasField("chunk")  # it was aborted
            return self.put(output)
        if self.is_broken:
            return True
        try:
            self.answer.add(OutputChunk(index=index, finish_reason=STOP))
            self._num_open = self.answer.num_unfinished
            self._take_timeline(output)
            self._take_prompt(output.prompt)
            self._meter.inputs.answered(index, prompt_tokens, output.prompt.cached_tokens)
            if self._attempt is not None:
                self._attempt.has_computed(prompt_tokens)
            self._client_buffer.add_whole(index, output)
            self._fanout.add(self._due)
        except Exception as error:
            self._fail(error)
        return True

    def put(self, output: SequenceOutput) -> bool:
        """Takes output of one choice. Returns False if it does not continue the previous output. Never raises, because
        the caller delivers other requests' output too."""
        if self._refused is not None:
            return True
        try:
            if output.HasField("error"):
                self._break_off(RequestRefused.from_proto(output.error), output)
                return True
            if self._broken is not None:
                return True  # another choice has ended the attempt: the next one computes this output again
            chunk = output.chunk
            index = chunk.index
            answer = self.answer
            try:
                num_tokens = answer.add(chunk)
            except OutOfOrder as error:
                self._break_off(no_worker(f"the worker lost its place: {error}"), SequenceOutput())
                return False
            if not num_tokens or answer.num_unfinished != self._num_open:
                self._take_end(output)
            if not answer.prompt_known and index == 0:
                self._take_prompt(output.prompt)  # an empty one if the choice ended before it began
            self._meter.add(num_tokens)
            self._client_buffer.add(index, chunk)
            if self._is_watched and self._attempt is not None:
                self._attempt_outputs += num_tokens > 0
                self._attempt.progressed(self._attempt_outputs // self._attempt_choices)
            if not self._due.is_set():
                if self._prompt_sent and answer.num_unfinished:
                    self._fanout.add(self._due)
                else:  # the first response should be fast, and no more output merges with the last
                    self._due.set()
        except Exception as error:
            self._fail(error)
        return True

    def _fail(self, error: Exception) -> None:
        """Ends the request because of a bug, which must not end the other requests of the worker's session."""
        get_logger().error("unexpected error", **self._record.log_fields(), exc_info=error)
        self._refuse(internal(self._record.request_id))
        if self._attempt is not None:
            self._attempt.broke_off()

    async def take(self) -> GenerateResponse | None:
        """Waits for new output and returns the next response, or None after the last one. Calling it again means that
        the previous response has been written.

        Raises BrokenOff if the attempt has ended and all of its output was taken, and RequestRefused if the request is
        over.
        """
        answer, client_buffer, due = self.answer, self._client_buffer, self._due
        if client_buffer.sending_bytes or (client_buffer.holds_any and self.handed_s):
            self._note_written()
        wholes = client_buffer.wholes
        while not ((has_output := wholes or (answer.prompt_known and client_buffer.holds_any)) and due.is_set()):
            if not has_output:
                if self._refused is not None:
                    raise self._refused
                if self._broken is not None:
                    raise self._broken
                if not (answer.num_unfinished or client_buffer.holds_any):
                    return None
            due.clear()
            await due.wait()
        self.handed_s = time.monotonic()
        response = GenerateResponse(request_id=self._record.request_id)
        if not self._prompt_sent and self._add_prompt(response):
            return response
        if wholes:
            self._add_whole(response)
        else:
            chunks = client_buffer.take()
            if self._parsers is not None:
                self._parsers.parse(chunks, response)
            response.chunks.extend(chunks.values())
        if client_buffer.holds_any or wholes:
            return response
        due.clear()
        if not answer.num_unfinished:
            response.usage.CopyFrom(answer.usage(self._prompt, self.resumptions))
        return response

    def _add_prompt(self, response: GenerateResponse) -> bool:
        """Adds the prompt to the first response. Returns whether it leaves no room for output."""
        self._prompt_sent = True
        self._record.first_token_s = self.handed_s
        response.prompt.CopyFrom(self._prompt)
        return bool(self._prompt.logprobs) and self._prompt.ByteSize() > MAX_PROMPT_BYTES

    def _add_whole(self, response: GenerateResponse) -> None:
        index, output = self._client_buffer.take_whole()
        response.chunks.add(index=index, finish_reason=STOP)
        kind = output.WhichOneof("output")
        assert kind is not None, "an output that is not whole"
        getattr(response, kind).CopyFrom(getattr(output, kind))

    def _break_off(self, refused: RequestRefused, output: SequenceOutput) -> None:
        """Ends the attempt with the first error of its choices. Any choice's error may make the request a suspect."""
        if self._broken is None:
            self._broken = BrokenOff(refused)
            self._is_at_worker = output.begun and refused.reason == DEADLINE_EXCEEDED  # the client's deadline
            if not self._is_at_worker:
                self._meter.inputs.lost()
            if self._attempt is not None:
                self._attempt.broke_off()
        self._take_timeline(output)
        self._broken.suspect |= output.suspect
        self._broken.sole_suspect |= output.sole_suspect
        self._due.set()

    def _take_end(self, output: SequenceOutput) -> None:
        """Takes an output that may be the last of its choice."""
        if self.answer.num_unfinished != self._num_open:
            self._num_open = self.answer.num_unfinished
            self._take_timeline(output)

    def _take_timeline(self, output: SequenceOutput) -> None:
        if self._attempt is not None and output.HasField("timeline"):
            self._attempt.choice_ended(output.timeline)

    def _note_written(self) -> None:
        """The last response has been written, and it was merged, or output has waited meanwhile."""
        waited_s = time.monotonic() - self.handed_s
        if self._client_buffer.holds_any and waited_s >= STALL_S:
            self._record.stalled_s += waited_s
        self._client_buffer.mark_sent()

    def _take_prompt(self, report: PromptReport) -> None:
        self.answer.prompt_known = True
        self._prompt.cached_tokens += report.cached_tokens
        self._prompt.logprobs.extend(report.logprobs)

    def fall_behind(self, why: str) -> None:
        """Ends the request because its client reads too slowly. Takes the reason."""
        self._record.fell_behind = True
        message = f"the client reads too slowly: {why}"
        self._refuse(RequestRefused(CODE_RESOURCE_EXHAUSTED, OVERLOADED, message, retry_delay_ms=COME_BACK_MS))
        if self._attempt is not None:
            self._attempt.gave_up()

    def _refuse(self, refused: RequestRefused) -> None:
        """Ends the request. Later output is ignored."""
        self._refused = refused
        self.close()
        self._due.set()

    def close(self) -> None:
        """Drops the buffered output because the client reads no more."""
        self._client_buffer.clear()
