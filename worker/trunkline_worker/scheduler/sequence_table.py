"""All sequences that run or wait: their submission, the results of their steps, and their end.

Plans are committed in the order in which they were made; submit(), abort() and finish() may come at any time. A result
for a sequence that has ended or was preempted meanwhile is dropped.
"""

from collections.abc import Container
from dataclasses import dataclass, field
from typing import NamedTuple

from trunkline.status import CODE_INTERNAL, INTERNAL, RequestRefused
from trunkline_worker.cache.blocks import KVBlocks
from trunkline_worker.cache.sequence import Finish, Sequence, StepMark
from trunkline_worker.scheduler.admission import OutputLengths
from trunkline_worker.scheduler.deadlines import Deadlines
from trunkline_worker.scheduler.running_set import RunningSet, StepsInFlight
from trunkline_worker.scheduler.stats import EngineStats
from trunkline_worker.scheduler.step_cost import StepCost, StepLoad
from trunkline_worker.scheduler.waiting import Waiting
from trunkline_worker.step.lanes import LANES
from trunkline_worker.step.plan import PositionLogprobs, RowError, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class PromptOutput:
    """What is known of a prompt when its first output token is sampled."""

    num_tokens: int
    cached_tokens: int
    logprobs: list[PositionLogprobs] | None  # of prompt positions 1..


@dataclass(slots=True)
class StepOutput:
    """What a step produced for one sequence."""

    sequence_id: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    finish: Finish | None = None
    stop_token_id: int | None = None
    prompt: PromptOutput | None = None  # with the first output
    whole: list[float] | None = None  # the output, if it is no tokens
    error: RequestRefused | None = None
    trace: str = ""  # for the log: traceback of the bug that caused `error`, if one did


class Chunk(NamedTuple):
    """A sequence's part in a step that computed more than its next token."""

    sequence_id: int
    num_tokens: int
    num_recomputed: int  # of them: tokens whose KV a preemption had taken


class LateToken(NamedTuple):
    """A token, not the first, whose sequence got none from the step before."""

    sequence_id: int
    since_s: float  # when the step of the token before was done
    # Device time per token, in seconds, summed over the steps since then that decoded none of the sequence.
    skipped_s: float


@dataclass(slots=True)
class StepOutputs:
    """What a step produced for all sequences. Most have one more token and nothing else: they are in two columns."""

    handles: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    special: list[StepOutput] = field(default_factory=list)
    num_regular: int = 0  # tokens that follow a token of the step before
    chunks: list[Chunk] = field(default_factory=list)
    late: list[LateToken] = field(default_factory=list)
    num_forced: int = 0  # tokens that were taken as they were proposed
    num_late_masks: int = 0  # sequences that sat out


@dataclass(slots=True, eq=False, kw_only=True)
class SequenceTable:
    """Sequences by id, from submit() to their end."""

    running: RunningSet
    waiting: Waiting
    blocks: KVBlocks
    in_flight: StepsInFlight
    deadlines: Deadlines
    cost: StepCost
    output_lengths: list[OutputLengths]  # by lane; each learns the length of a sequence that ends by itself
    stats: EngineStats
    by_id: dict[int, Sequence] = field(default_factory=dict, init=False)
    last_commit: StepMark = field(default=StepMark(float("nan"), 0.0), init=False)
    last_load: StepLoad = field(default=StepLoad(0, 0, 0.0), init=False)  # of the latest committed step

    def submit(self, sequence: Sequence) -> None:
        """Puts a sequence into the queue. Its id must be new, its sampling bounded by the pool."""
        assert sequence.sequence_id not in self.by_id, "sequence ids are unique"
        self.by_id[sequence.sequence_id] = sequence
        self.waiting.put(sequence, self.deadlines.start_by_s(sequence))
        self.stats.lanes[sequence.lane].accepted += 1
        self.running.note_change()

    def abort(self, sequence_id: int, now_s: float) -> bool:
        """Drops a sequence, running or waiting; its blocks are free at the next step boundary. Returns False if it has
        ended already."""
        sequence = self.by_id.get(sequence_id)
        if sequence is None:
            return False
        self._remove(sequence)
        self.stats.ended(sequence, Finish.ABORT, now_s)
        return True

    def finish(self, sequence_id: int, now_s: float) -> bool:
        """Ends a sequence for a reason that the engine cannot see, a stop string. Returns False if it has ended
        already."""
        sequence = self.by_id.get(sequence_id)
        if sequence is None:
            return False
        self._finished(sequence, Finish.STOP, now_s)
        return True

    def expire(self, sequence: Sequence) -> None:
        """Drops a waiting sequence that cannot meet its deadline any more."""
        self._remove(sequence)
        self.stats.expired(sequence)

    def commit(self, plan: StepPlan, result: StepResult, now_s: float) -> StepOutputs:
        """Takes in the result of the oldest plan. Entries of sequences that have ended or were preempted are dropped.

        now_s: when the step was done
        """
        assert result.step_id == plan.step_id, "the result is of another step"
        load = self.last_load = self.in_flight.take(plan)
        self.cost.observe(load, result.device_time_s)
        self.running.free_retired(plan.step_id)
        outputs = StepOutputs()
        stats, sequences = self.stats, self.by_id
        before = self.last_commit
        per_token_s = result.device_time_s / (load.num_tokens - plan.num_padding)  # see LateToken.skipped_s
        mark = StepMark(now_s, before.device_s_per_token + per_token_s)
        # Most tokens follow a token of the step before, so the time since that token is the same for all of them. The
        # loop only counts them, by lane; they enter the statistics together after it.
        regular = [0 for _ in LANES]
        block_size, token_ids = self.blocks.block_size, result.token_ids
        several = _entries_of_several(plan, result)
        for index, (sequence_id, generation, _, num_new, _, samples) in enumerate(plan.steps):
            sequence = sequences.get(sequence_id)
            if sequence is None or sequence.generation != generation:
                stats.stale_results += samples  # it has ended, or was preempted, since the plan was made
                continue
            if several and index in several:
                regular[sequence.lane] += self._take_several(sequence, index, plan, result, outputs, mark)
                continue
            computed = sequence.num_computed + num_new
            if computed // block_size > sequence.num_published:  # a block is full now: others may share it
                self.running.publish(sequence, computed)
            else:
                sequence.num_computed = computed
            if result.errors and index in result.errors:
                outputs.special.append(self._break_off(sequence, result.errors[index], now_s))
                continue
            if not samples:  # a chunk that does not reach the end of the prompt
                outputs.chunks.append(_chunk(sequence, computed, num_new))
                if sequence.prompt_logprobs is not None and index in result.prompt_logprobs:
                    sequence.prompt_logprobs += result.prompt_logprobs[index]
                continue
            sequence.num_pending -= 1
            token_id = token_ids[index]
            assert token_id is not None, "an entry that samples has a token or an error"
            # The first token, the one that may be the last, and one with log-probabilities have an output of their
            # own; all others are a handle and a token in two columns.
            if (
                not sequence.reported
                or token_id in sequence.end_token_ids
                or len(sequence.token_ids) == sequence.last_to_compute
                or sequence.sampling.logprobs is not None
            ):
                outputs.special.append(self._take_sample(sequence, index, token_id, result, now_s=now_s))
            else:
                sequence.token_ids.append(token_id)
                outputs.handles.append(sequence_id)
                outputs.token_ids.append(token_id)
            account = sequence.account
            account.output_tokens += 1
            if sequence.last_token is before:  # see StepMark
                regular[account.lane] += 1
            else:
                self._take_irregular(sequence, outputs, computed=computed, num_new=num_new, before=before, mark=mark)
            sequence.last_token = mark
        for lane, count in enumerate(regular):
            if count:
                stats.lanes[lane].itl.add(now_s - before.done_s, count)
                stats.lanes[lane].output_tokens += count
                outputs.num_regular += count
        self.last_commit = mark
        return outputs

    def _take_several(
        self,
        sequence: Sequence,
        index: int,
        plan: StepPlan,
        result: StepResult,
        outputs: StepOutputs,
        mark: StepMark,
    ) -> bool:
        """Takes in an entry that may have any number of tokens: one with a run or a whole output, or one that sat out.
        Returns whether it has a token that follows one of the step before; the tokens of a run arrive together, and
        count as one here."""
        if index in result.errors:
            outputs.special.append(self._break_off(sequence, result.errors[index], mark.done_s))
            return False
        if index in result.wholes:
            num_new = plan.steps[index].num_new
            outputs.chunks.append(_chunk(sequence, sequence.num_computed + num_new, num_new))
            outputs.special.append(self._take_whole(sequence, index, result, mark.done_s, num_new=num_new))
            return False
        num_new = plan.steps[index].num_new - (plan.runs[index].num_new if index in plan.runs else 0)
        tokens = result.runs.get(index)
        if tokens is None:
            # It sat out: see Scheduler.masks(). The state of its last token is needed again.
            outputs.num_late_masks += 1
            computed = sequence.num_computed + num_new - 1
            self.running.publish(sequence, computed)
            if num_new > 1:
                outputs.chunks.append(_chunk(sequence, computed, num_new - 1))
            if sequence.prompt_logprobs is not None and index in result.prompt_logprobs:
                sequence.prompt_logprobs += result.prompt_logprobs[index]
            return False
        output = self._extended(sequence, index, tokens, result, mark.done_s)
        outputs.special.append(output)
        outputs.num_forced += min(plan.runs[index].num_forced, len(output.token_ids))
        known = sequence.num_computed + num_new
        # Like a sampled token, the last one does not count as computed.
        self.running.publish(sequence, len(sequence.token_ids) - 1)
        sequence.fall_back(len(sequence.token_ids) - 1)
        if output.finish is not None:
            self._finished(sequence, output.finish, mark.done_s)
        count, before = len(output.token_ids), self.last_commit
        sequence.account.output_tokens += count
        is_regular = sequence.last_token is before
        if not is_regular:
            self._take_irregular(sequence, outputs, computed=known, num_new=num_new, before=before, mark=mark)
        self.stats.lanes[sequence.lane].output_tokens += count - 1
        sequence.last_token = mark
        return is_regular

    def commit_copies(self, plan: StepPlan) -> StepOutputs:
        """Takes in the oldest plan, which has no entries: nothing was computed."""
        self.last_load = self.in_flight.take(plan)
        return StepOutputs()

    def _take_whole(
        self, sequence: Sequence, index: int, result: StepResult, now_s: float, *, num_new: int
    ) -> StepOutput:
        """Ends a sequence whose output is no tokens: it comes with the last token of the prompt."""
        self.running.publish(sequence, sequence.num_computed + num_new)
        sequence.num_pending -= 1
        output = self._extended(sequence, index, [], result, now_s)
        output.whole, output.finish = result.wholes[index], Finish.STOP
        self._finished(sequence, Finish.STOP, now_s)
        return output

    def _take_irregular(
        self, sequence: Sequence, outputs: StepOutputs, *, computed: int, num_new: int, before: StepMark, mark: StepMark
    ) -> None:
        """Counts a token that does not follow a token of the step before.

        computed: tokens that are computed after the step; before, mark: the end of the step before, and of this one
        """
        lane, last = self.stats.lanes[sequence.lane], sequence.last_token
        lane.output_tokens += 1
        is_chunk = num_new > 1 or last is None
        if is_chunk:
            outputs.chunks.append(_chunk(sequence, computed, num_new))
        if last is not None:
            lane.itl.add(mark.done_s - last.done_s)
            until = mark if is_chunk else before
            skipped_s = until.device_s_per_token - last.device_s_per_token
            outputs.late.append(LateToken(sequence.sequence_id, last.done_s, skipped_s))

    def _break_off(self, sequence: Sequence, error: RowError, now_s: float) -> StepOutput:
        """Ends a sequence for which a step returned an error."""
        self._remove(sequence)
        self.stats.ended(sequence, Finish.ABORT, now_s)
        refused = RequestRefused(CODE_INTERNAL, INTERNAL, error.reason)
        return StepOutput(sequence.sequence_id, error=refused, trace=error.trace)

    def _take_sample(
        self, sequence: Sequence, index: int, token_id: int, result: StepResult, *, now_s: float
    ) -> StepOutput:
        """A sample that is more than one more token: the first, the last, or one with log-probabilities."""
        output = self._extended(sequence, index, [token_id], result, now_s)
        if output.finish is not None:
            self._finished(sequence, output.finish, now_s)
        return output

    def _extended(
        self, sequence: Sequence, index: int, token_ids: list[int], result: StepResult, now_s: float
    ) -> StepOutput:
        """Appends an entry's tokens to its sequence, up to the one that ends it. The caller ends the sequence."""
        output = StepOutput(sequence.sequence_id)
        if sequence.prompt_logprobs is not None and index in result.prompt_logprobs:
            sequence.prompt_logprobs += result.prompt_logprobs[index]
        if not sequence.reported:
            sequence.reported = True
            # The prompt's last token is not charged yet where it was computed like a decode.
            sequence.account.input_tokens += max(0, len(sequence.token_ids) - sequence.num_charged)
            sequence.first_token_s = now_s
            self.stats.first_token(sequence, now_s)
            output.prompt = PromptOutput(sequence.prompt_len, sequence.cached_tokens or 0, sequence.prompt_logprobs)
            sequence.prompt_logprobs = None
        sampling = sequence.sampling
        for token_id in token_ids:
            sequence.token_ids.append(token_id)
            output.token_ids.append(token_id)
            if token_id in sampling.end_token_ids and sequence.num_output > sampling.min_tokens:
                output.finish = Finish.STOP
                output.stop_token_id = token_id
                break
            if sequence.num_output >= sampling.max_tokens:
                output.finish = Finish.LENGTH
                break
        if index in result.logprobs:
            output.logprobs = result.logprobs[index][: len(output.token_ids)]
        return output

    def _finished(self, sequence: Sequence, finish: Finish, now_s: float) -> None:
        if sequence.num_output:  # other outputs than tokens say nothing of the lengths of answers
            self.output_lengths[sequence.lane].observe(sequence.num_output)
        self._remove(sequence)
        self.stats.ended(sequence, finish, now_s)

    def _remove(self, sequence: Sequence) -> None:
        del self.by_id[sequence.sequence_id]
        if sequence in self.waiting:
            self.waiting.remove(sequence)
            self.running.note_change()
        else:
            self.running.leave(sequence)

    def check_integrity(self) -> None:
        """Asserts that each sequence either runs or waits."""
        assert {id(s) for s in (*self.running.members, *self.waiting)} == {id(s) for s in self.by_id.values()}


def _entries_of_several(plan: StepPlan, result: StepResult) -> Container[int]:
    """The entries of a plan that do not have exactly one token: because of a run, because they sat out, or because
    their output is whole."""
    if not (plan.runs or plan.masked or result.wholes):
        return ()
    late = {i for i in plan.masked if result.token_ids[i] is None and i not in result.errors}
    return late | plan.runs.keys() | result.wholes.keys()


def _chunk(sequence: Sequence, computed: int, num_new: int) -> Chunk:
    """The chunk that ends at `computed` tokens."""
    again = sequence.num_evicted - (computed - num_new)
    return Chunk(sequence.sequence_id, num_new, min(num_new, max(0, again)))
