"""Checks the outputs that arrive on a worker's Session stream, and passes each to the sink of its choice."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from trunkline.status import no_worker
from trunkline.v1.generation_pb2 import OutputChunk
from trunkline.v1.worker_pb2 import GrantReport, SequenceOutput, Timeline
from trunkline_router.workers.claims import FalseClaim
from trunkline_router.workers.output_claims import OpenChoice, end_problem, is_whole, output_problem, report_problem
from trunkline_runtime.log import get_logger

# Idle outputs say nothing: they are without tokens or an end, or of choices that are not open. A worker may send some
# for each handle (reports of grants, and what newer workers may send), and one for each token that an aborted choice
# still lacked. At most so many may be on the way to a router that stood still.
IDLE_PER_HANDLE, MOST_IDLE = 64, 1 << 21

LOST = "the worker was lost while it computed this request"
NO_SEQUEL = "output does not follow what came before"

# One invalid answer may be a bug that a single request triggers. A worker is disconnected once it has this many, and
# more than this share of all its answers.
FALSE_ANSWERS, FALSE_SHARE = 3, 0.1

PATIENCE_S = 1.0  # a worker's front answers an abort within milliseconds
MOST_AWAITED = 4096

# Takes the report on a grant, by its handle; None: the stream has ended, and no report will follow.
GrantSink = Callable[[int, GrantReport | None], None]
# Takes the timeline of an aborted choice; None: the worker did not tell it in time.
EndSink = Callable[[Timeline | None], None]


@dataclass(slots=True, frozen=True)
class GrantedChoice:
    """A choice that a client takes to the worker with a grant."""

    sink: GrantSink
    most_tokens: int
    prompt_tokens: int


class SessionOutputs:
    """The receiving side of a session. Calls `abort` with the handle of an open choice that is no longer wanted.

    Methods that take a worker's messages raise FalseClaim if they cannot be true, beyond what a bug with single
    requests explains.
    """

    def __init__(self, abort: Callable[[int], object]) -> None:
        self._abort = abort
        self.open: dict[int, OpenChoice] = {}
        self.granted: dict[int, GrantedChoice] = {}
        # Of aborted choices whose timelines are awaited for a short time; they only explain what became of a request.
        self._awaited: dict[int, tuple[EndSink, asyncio.TimerHandle]] = {}
        self.last_handle = 0  # the highest that was ever sent
        self.num_step_outputs = 0  # without refusals, which a front gives without its engine
        self._num_ended = self._num_false = 0  # answers
        self._left_idle = 0  # outputs that may still arrive

    def new_handle(self) -> int:
        self._allow_idle(IDLE_PER_HANDLE)
        self.last_handle += 1
        return self.last_handle

    def hand_out_all(self, outputs: Sequence[SequenceOutput]) -> None:
        """Passes outputs to their sinks. Every token of every request comes through here. Most outputs are one token of
        their choice and nothing else, which takes few of the checks of output_problem()."""
        opened = self.open
        for output in outputs:
            choice = opened.get(output.handle)
            if choice is None:
                self.hand_out(output)
                continue
            # Both stay referenced while the sink runs, so that protobuf need not make them again.
            chunk = output.chunk
            token_ids = chunk.token_ids
            if (
                choice.is_first
                or choice.has_logprobs
                or len(token_ids) != 1
                or chunk.finish_reason
                or chunk.index != choice.index
                or not 0 <= token_ids[0] < choice.vocab_size
                or not choice.left_tokens
                or output.HasField("error")
            ):
                self.hand_out(output)
                continue
            choice.left_tokens -= 1
            self.num_step_outputs += 1
            try:
                if choice.sink(output) is not False:
                    continue
            except Exception as error:
                log_bug(error)
            else:
                self._count_false(NO_SEQUEL)
            self._abort(output.handle)

    def hand_out(self, output: SequenceOutput) -> None:
        """Passes one output of any kind to its sink, after a full check."""
        handle = output.handle
        choice = self.open.get(handle)
        if choice is None:
            self._check_handle(handle)
            if output.HasField("granted"):
                self._take_report(handle, output.granted)
                return
            self._take_late(handle, output)
            return
        is_error = output.HasField("error")
        chunk: OutputChunk = output.chunk
        if not (is_error or chunk.token_ids) and output.WhichOneof("output") is None:
            self._count_idle()  # it has what a newer worker may add, and nothing that this router knows
            return
        problem = end_problem(output, choice) if is_error else output_problem(output, chunk, choice)
        if problem is not None:
            self._refuse(handle, choice, problem)
            return
        self.num_step_outputs += not is_error
        if ended := is_error or chunk.finish_reason or (choice.whole and is_whole(output)):
            del self.open[handle]
            self._num_ended += 1
        elif not chunk.token_ids:
            self._count_idle()
        follows = deliver(choice.sink, output)
        if follows is False:
            self._count_false(NO_SEQUEL)
        if not follows and not ended:
            self._abort(handle)

    def may_be_large(self, handle: int, num_bytes: int) -> bool:
        """Whether one large output may be parsed: its choice is open, and can have an output of this size."""
        if (choice := self.open.get(handle)) is None:
            self._check_handle(handle)
            self._count_idle()
            return False
        if num_bytes > choice.most_bytes:
            self._refuse(handle, choice, f"one output has {num_bytes} bytes")
            return False
        return True

    def await_end(self, handle: int, sink: EndSink) -> bool:
        """Calls the sink once with the timeline of an aborted choice. Returns False if too many are awaited already."""
        if len(self._awaited) >= MOST_AWAITED:
            return False
        give_up = asyncio.get_running_loop().call_later(PATIENCE_S, self._tell_end, handle, None)
        self._awaited[handle] = (sink, give_up)
        return True

    def drop(self, handle: int) -> bool:
        """Ignores a choice's outputs from now on. Returns False if the choice is not open."""
        choice = self.open.pop(handle, None)
        if choice is None:
            return False
        self._allow_idle(choice.left_tokens)
        return True

    def forget(self, handles: Iterable[int]) -> None:
        """Ignores reports on these grants from now on."""
        for handle in handles:
            self.granted.pop(handle, None)

    def end_all(self, why: str) -> None:
        """Ends every open choice with UNAVAILABLE."""
        choices = dict(self.open)
        self.open.clear()
        for handle, choice in choices.items():
            self._allow_idle(choice.left_tokens)
            deliver(choice.sink, lost(handle, why))

    def close(self, why: str) -> None:
        """Ends every open choice with UNAVAILABLE, and tells the sinks of grants and aborted choices that nothing will
        follow."""
        self.end_all(why)
        choices = dict(self.granted)
        self.granted.clear()
        for handle, choice in choices.items():
            deliver(choice.sink, handle, None)
        for handle in list(self._awaited):
            self._tell_end(handle, None)

    def _tell_end(self, handle: int, timeline: Timeline | None) -> bool:
        """Returns False if the end of this choice is not awaited."""
        if (awaited := self._awaited.pop(handle, None)) is None:
            return False
        sink, give_up = awaited
        give_up.cancel()
        deliver(sink, timeline)
        return True

    def _check_handle(self, handle: int) -> None:
        """Raises FalseClaim if no choice was ever sent with this handle."""
        if not 0 < handle <= self.last_handle:
            raise FalseClaim(f"the worker answers a request that was never sent: handle {handle}")

    def _refuse(self, handle: int, choice: OpenChoice, problem: str) -> None:
        """Ends a choice whose output is invalid."""
        self._abort(handle)
        deliver(choice.sink, lost(handle, f"the worker's answer makes no sense: {problem}"))
        self._count_false(problem)

    def _take_report(self, handle: int, report: GrantReport) -> None:
        choice = self.granted.get(handle)
        if choice is None or not report.ended:
            self._count_idle()
        if choice is None:
            return
        problem = report_problem(report, prompt_tokens=choice.prompt_tokens, most_tokens=choice.most_tokens)
        if problem is not None:
            # Its reports on the request's other choices are not believed either.
            self.forget([other for other, each in self.granted.items() if each.sink == choice.sink])
            deliver(choice.sink, handle, None)
            self._count_false(problem)
            return
        if report.ended:
            del self.granted[handle]
        deliver(choice.sink, handle, report)

    def _take_late(self, handle: int, output: SequenceOutput) -> None:
        """Takes an output of a choice that was aborted."""
        is_timeline_only = not (output.HasField("chunk") or output.HasField("error"))
        is_awaited = output.HasField("timeline") and self._tell_end(handle, output.timeline)
        if not (is_timeline_only and is_awaited):
            self._count_idle()
        # The answer to an abort comes from the front, so it does not show that the engine works.
        self.num_step_outputs += output.WhichOneof("output") is not None and not output.HasField("error")

    def _allow_idle(self, count: int) -> None:
        self._left_idle = min(self._left_idle + count, MOST_IDLE)

    def _count_idle(self) -> None:
        """Counts an idle output. Raises FalseClaim if there are too many of them."""
        self._left_idle -= 1
        if self._left_idle < 0:
            raise FalseClaim("the worker sends outputs of choices that have ended, or outputs without content")

    def _count_false(self, problem: str) -> None:
        """Counts an invalid answer. Raises FalseClaim if there are too many of them."""
        self._num_false += 1
        self._num_ended += 1
        if self._num_false >= FALSE_ANSWERS and self._num_false > FALSE_SHARE * self._num_ended:
            raise FalseClaim(f"the worker's answers make no sense: {problem}")


def lost(handle: int, why: str) -> SequenceOutput:
    """Returns the last output of a choice that the worker will not finish."""
    return SequenceOutput(handle=handle, error=no_worker(why).to_proto())


def deliver(sink: Callable[..., object], *arguments: object) -> bool | None:
    """Calls a sink. Returns whether it accepted; None if it raised: a bug with one request must not end the session."""
    try:
        return sink(*arguments) is not False
    except Exception as error:
        log_bug(error)
        return None


def log_bug(error: Exception) -> None:
    get_logger().error("unexpected error", exc_info=error)
