"""What a worker answers on its Session stream, handed to those who wait for it."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from trunkline.status import no_worker
from trunkline.v1.generation_pb2 import OutputChunk
from trunkline.v1.worker_pb2 import GrantReport, SequenceOutput, SessionResponse, SessionWelcome
from trunkline_router.claims.model_check import FalseClaim
from trunkline_router.claims.worker_claims import Expected, end_problem, output_problem, report_problem
from trunkline_router.sessions.outputs_summary import OutputsSummary, outputs_summary
from trunkline_router.sessions.session_message import large_output, split_response
from trunkline_runtime.log import get_logger

# Of a message, handed out at once: one or two milliseconds. For more, others have their turn in between.
FEW_OUTPUTS = 256
# Of a message, parsed at once: a millisecond or so, whatever is in it. Longer ones are parsed in parts.
PART_BYTES = 64 << 10
PART_FIELDS = 1024  # to find where so many end takes half a millisecond

# Outputs that bring neither tokens nor an end, for each handle: reports of grants, and what newer workers may tell.
EMPTY_PER_HANDLE, MOST_EMPTY = 64, 1 << 16
# Outputs of choices that were aborted: a worker may have so many on the way to a router that stood still.
MOST_LATE = 1 << 21

LOST = "the worker was lost while it computed this request"
NO_SEQUEL = "output does not follow what came before"

# One answer that makes no sense may be a bug that one request meets. A worker of which more than this many do, and more
# than this share of all, is left alone.
FALSE_ANSWERS, FALSE_SHARE = 3, 0.1

# Takes the news; False where they do not follow what came before.
Sink = Callable[[SequenceOutput], object]
# What became of a grant, by its handle; None: the stream has ended, and nothing more is told.
GrantSink = Callable[[int, GrantReport | None], None]


@dataclass(slots=True, frozen=True)
class OpenChoice:
    """A choice that the worker computes."""

    sink: Sink
    expected: Expected


@dataclass(slots=True, frozen=True)
class GrantedChoice:
    """The same of one that a client takes there."""

    sink: GrantSink
    most_tokens: int
    prompt_tokens: int


class SessionOutputs:
    """`abort` is called with the handle of a choice of which nothing more is wanted, while it is open.

    Methods that take in what a worker says raise FalseClaim where it cannot be true, beyond what a bug with single
    requests would explain.
    """

    def __init__(self, vocab_size: int, abort: Callable[[int], None]) -> None:
        self._vocab_size = vocab_size
        self._abort = abort
        self.open: dict[int, OpenChoice] = {}
        self.granted: dict[int, GrantedChoice] = {}
        self.last_handle = 0  # of all that was ever sent
        self.num_step_outputs = 0  # outputs of steps; refusals, which a front gives without its engine, are none
        self._num_ended = self._num_false = 0  # answers
        # Outputs that may still come without content, for handles up to this one, and of choices that were aborted.
        self._left_empty = self._counted_handle = self._left_late = 0

    async def hear(self, raw: bytes, welcome: Callable[[SessionWelcome], None]) -> None:
        """One message. Raises DecodeError and NotAMessage too."""
        if len(raw) <= PART_BYTES:
            await self._hear_part(raw, welcome)
            return
        for part in split_response(raw, PART_BYTES, PART_FIELDS):
            if len(part) <= PART_BYTES or self._is_expected(part):
                await self._hear_part(part, welcome)
            await asyncio.sleep(0)

    async def _hear_part(self, raw: bytes, welcome: Callable[[SessionWelcome], None]) -> None:
        known = outputs_summary(raw, self._vocab_size)
        response = SessionResponse.FromString(raw)
        if response.HasField("welcome"):
            welcome(response.welcome)
        outputs = response.outputs
        if len(outputs) <= FEW_OUTPUTS:
            self.hand_out_all(outputs, known)
            return
        for start in range(0, len(outputs), FEW_OUTPUTS):
            self.hand_out_all(outputs[start : start + FEW_OUTPUTS], known)
            await asyncio.sleep(0)

    def _is_expected(self, part: bytes) -> bool:
        """Whether a single output of this size can be what was asked for. It is not parsed where it cannot, or where
        its choice was aborted meanwhile."""
        handle = large_output(part)
        if handle is None:
            raise FalseClaim(f"the worker sends {len(part)} bytes that are no output")
        if (taker := self.open.get(handle)) is None:
            self._check_handle(handle)
            self._count_late()
            return False
        if len(part) > taker.expected.most_bytes:
            self._refuse(handle, taker, f"one output has {len(part)} bytes")
            return False
        return True

    def hand_out_all(self, outputs: Sequence[SequenceOutput], known: OutputsSummary | None) -> None:
        """Every token of every request comes through here. Most outputs are one more token of their choice and nothing
        else; for these `known`, of the whole message, tells most of what output_problem() would look for in each."""
        if known is None:
            for output in outputs:
                self.hand_out(output)
            return
        opened, tokens_alone, is_indexed = self.open, known.tokens_alone, known.is_indexed
        for output in outputs:
            handle = output.handle
            taker = opened.get(handle)
            if taker is None or not (tokens_alone or not output.HasField("error")):
                self.hand_out(output)
                continue
            # Both are kept while the sink takes the output, which then need not make them again.
            chunk = output.chunk
            token_ids = chunk.token_ids
            expected = taker.expected
            left_tokens = expected.left_tokens - len(token_ids)
            if (
                expected.is_first
                or left_tokens < 0
                or not token_ids
                or not (tokens_alone or not chunk.finish_reason)
                or ((is_indexed or expected.choice) and chunk.index != expected.choice)
            ):
                self.hand_out(output)
                continue
            expected.left_tokens = left_tokens
            self.num_step_outputs += 1
            try:
                if taker.sink(output) is not False:
                    continue
            except Exception as error:
                _log_bug(error)
            else:
                self._count_false(NO_SEQUEL)
            self._abort(handle)

    def hand_out(self, output: SequenceOutput) -> None:
        """Any output, all of which is checked."""
        handle = output.handle
        taker = self.open.get(handle)
        if taker is None:
            self._check_handle(handle)
            if output.HasField("granted"):
                self._hear_of_grant(handle, output.granted)
                return
            self._count_late()
            if not output.HasField("error"):
                self.num_step_outputs += 1  # aborted meanwhile
            return
        is_error = output.HasField("error")
        chunk: OutputChunk = output.chunk
        expected = taker.expected
        problem = end_problem(output, expected) if is_error else output_problem(output, chunk, expected)
        if problem is not None:
            self._refuse(handle, taker, problem)
            return
        self.num_step_outputs += not is_error
        if ended := is_error or chunk.finish_reason:
            del self.open[handle]
            self._num_ended += 1
        elif not chunk.token_ids:
            self._count_empty()
        follows = tell(taker.sink, output)
        if follows is False:
            self._count_false(NO_SEQUEL)
        if not follows and not ended:
            self._abort(handle)

    def drop(self, handle: int) -> bool:
        """Nothing more is wanted of a choice: what still comes of it goes nowhere. False where it is not open."""
        taker = self.open.pop(handle, None)
        if taker is None:
            return False
        self._expect_late(taker)
        return True

    def forget(self, handles: Iterable[int]) -> None:
        """Drops these grants: reports on them are no longer passed on."""
        for handle in handles:
            self.granted.pop(handle, None)

    def end_all(self, why: str) -> None:
        """Every open choice ends with UNAVAILABLE."""
        takers = dict(self.open)
        self.open.clear()
        for handle, taker in takers.items():
            self._expect_late(taker)
            tell(taker.sink, lost(handle, why))

    def end_grants(self) -> None:
        """Nothing more is heard of any."""
        takers = dict(self.granted)
        self.granted.clear()
        for handle, taker in takers.items():
            tell(taker.sink, handle, None)

    def _check_handle(self, handle: int) -> None:
        """Raises FalseClaim where nothing was ever sent by this handle."""
        if not 0 < handle <= self.last_handle:
            raise FalseClaim(f"the worker answers what it was never sent: handle {handle}")

    def _refuse(self, handle: int, taker: OpenChoice, problem: str) -> None:
        """Ends a choice of which the worker says what cannot be."""
        self._abort(handle)
        tell(taker.sink, lost(handle, f"the worker's answer makes no sense: {problem}"))
        self._count_false(problem)

    def _hear_of_grant(self, handle: int, report: GrantReport) -> None:
        taker = self.granted.get(handle)
        if taker is None or not report.ended:
            self._count_empty()
        if taker is None:
            return
        problem = report_problem(report, prompt_tokens=taker.prompt_tokens, most_tokens=taker.most_tokens)
        if problem is not None:
            # Of the request's other choices it is not believed either.
            self.forget([other for other, each in self.granted.items() if each.sink == taker.sink])
            tell(taker.sink, handle, None)
            self._count_false(problem)
            return
        if report.ended:
            del self.granted[handle]
        tell(taker.sink, handle, report)

    def _expect_late(self, taker: OpenChoice) -> None:
        """Of an aborted choice at most an output for each token comes, until the worker knows."""
        self._left_late = min(self._left_late + max(0, taker.expected.left_tokens), MOST_LATE)

    def _count_late(self) -> None:
        """An output of a choice that is not open. Raises FalseClaim where the aborted ones do not explain it."""
        if self._left_late:
            self._left_late -= 1
        else:
            self._count_empty()

    def _count_empty(self) -> None:
        """An output without content. Raises FalseClaim where it is one too many."""
        new_handles = self.last_handle - self._counted_handle
        self._counted_handle = self.last_handle
        self._left_empty = min(self._left_empty + EMPTY_PER_HANDLE * new_handles, MOST_EMPTY) - 1
        if self._left_empty < 0:
            raise FalseClaim("the worker goes on about choices that have ended, or sends news without content")

    def _count_false(self, problem: str) -> None:
        """Raises FalseClaim where it is one too many."""
        self._num_false += 1
        self._num_ended += 1
        if self._num_false >= FALSE_ANSWERS and self._num_false > FALSE_SHARE * self._num_ended:
            raise FalseClaim(f"the worker's answers make no sense: {problem}")


def tell(hear: Callable[..., object], *news: object) -> bool | None:
    """Whether it took the news; None where it raised: one request's bug must not end the session that others share."""
    try:
        return hear(*news) is not False
    except Exception as error:
        _log_bug(error)
        return None


def lost(handle: int, why: str) -> SequenceOutput:
    """The last news of a choice that the worker will not bring to its end."""
    return SequenceOutput(handle=handle, error=no_worker(why).to_proto())


def _log_bug(error: Exception) -> None:
    get_logger().error("unexpected error", exc_info=error)
