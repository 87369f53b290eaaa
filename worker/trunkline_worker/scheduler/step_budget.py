"""What is left of a step's budgets while it is being filled: tokens, tokens for the lower lanes, and time."""

from trunkline_worker.cache.sequence import Sequence
from trunkline_worker.scheduler.limits import SchedulerLimits
from trunkline_worker.scheduler.step_cost import (
    LEAST_ADDED_SHARE,
    MOST_PAIR_SHARE,
    StepCost,
    StepLoad,
    chunk_pairs,
    longest_chunk,
)
from trunkline_worker.step.lanes import Lane
from trunkline_worker.step.plan import Run

# The first prompt in order advances by at least this many tokens in a step, or by all that are left, however slow the
# device is: a prompt that never advanced would stall everything behind it.
LEAST_CHUNK = 16
# Of the time that is left for prompts, in a step that samples the first token of a tenant's only running sequence.
HASTENED_SHARE = 0.25


class StepBudget:
    """Filled with decodes first, then with chunks."""

    def __init__(self, limits: SchedulerLimits, cost: StepCost) -> None:
        self._limits = limits
        self._cost = cost
        self.tokens_left = limits.max_step_tokens
        self.lower_left = limits.max_step_tokens - limits.reserved_step_tokens
        self.num_decode = 0
        self.decode_kv_tokens = 0
        self.num_prefill = 0
        self.num_in_runs = self._num_sampled_in_runs = 0  # in addition to what the sequences have without runs
        self._pairs = 0.0
        self._num_chunks = self._num_scored = self._num_last_chunks = self._chunk_kv_tokens = 0
        self._most_prefill = self._most_pairs = float("inf")  # known not to take too long
        self._time_left_s: float | None = None
        self._has_urgent = self._is_hastened = False

    def decodes_are_in(self) -> None:
        """Called once all decodes are counted: the rest of the step's time is for chunks."""
        if not self._limits.itl_target_s:
            return
        target_s = self._cost.within_s(self._limits.itl_target_s)
        num_tokens = self.num_decode + self.num_in_runs
        decodes_s = self._cost.time_s(StepLoad(num_tokens, self.decode_kv_tokens, 0.0))
        cautious_s = self._cost.cautious_s(num_tokens, self.decode_kv_tokens)
        decodes_s = max(decodes_s, min(cautious_s, target_s)) + self._cost.other_experts_s(num_tokens)
        target_s = self._cost.prompts_within_s(self._limits.itl_target_s)
        self._time_left_s = max(target_s - decodes_s, LEAST_ADDED_SHARE * decodes_s)
        room = self._cost.experience.room(self._time_left_s, 1 / MOST_PAIR_SHARE)
        self._most_prefill, self._most_pairs = room

    def room(self, lane: Lane) -> int:
        """Tokens that a lane may still take."""
        if (
            self._time_left_s is not None
            and self.num_prefill
            and (self._time_left_s <= 0 or (lane and self._has_urgent))
        ):
            return 0
        return min(self.tokens_left, self.lower_left) if lane else self.tokens_left

    def tokens_for(self, sequence: Sequence) -> int:
        """Tokens that are left for a sequence, whatever time they take."""
        return min(self.tokens_left, self.lower_left) if sequence.lane else self.tokens_left

    def take_run(self, sequence: Sequence, run: Run) -> None:
        """Takes a run into the step, whose sequence it has already."""
        self.num_in_runs += run.num_new
        self._num_sampled_in_runs += run.num_samples - 1
        self.decode_kv_tokens += run.num_new
        self.tokens_left -= run.num_new
        if sequence.lane:
            self.lower_left -= run.num_new

    def hasten(self) -> None:
        """Gives the rest of the prompts a quarter of the time that is left: a tenant with no other running sequence
        gets a first token from this step, and has waited for the step before it."""
        if self._time_left_s is not None and not self._is_hastened:
            self._is_hastened = True
            self._time_left_s *= HASTENED_SHARE

    def can_begin(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence would get at least one token in this step. Otherwise it would hold a place and
        blocks without computing, and go before sequences of tenants that were served less."""
        cached = sequence.num_known_cached
        num_left = len(sequence.token_ids) - cached
        room = min(self.room(sequence.lane), self._longest_chunk(sequence, cached, num_left))
        if self._limits.indivisible:
            return room >= num_left or not self.num_prefill
        return room > 0

    def aged_tokens(self, aged: Sequence, divisor: int) -> int:
        """The most tokens that an aged sequence takes of a step: those that fit into the time left over `divisor`, and
        at least LEAST_CHUNK."""
        if self._time_left_s is None:
            return aged.num_unscheduled
        time_s, is_scored = self._time_left_s / divisor, aged.wants_prompt_logprobs
        return max(LEAST_CHUNK, self._cost.longest_chunk(time_s, aged.num_scheduled, is_scored=is_scored))

    def _longest_chunk(self, sequence: Sequence, num_before: int, num_left: int) -> int:
        """The most tokens of a sequence, after `num_before` and out of `num_left`, for which the step has time."""
        if self._time_left_s is None:
            return num_left
        is_scored = sequence.wants_prompt_logprobs
        longest = self._cost.longest_chunk(self._time_left_s, num_before, is_scored=is_scored)
        known = longest_chunk(self._most_pairs - self._pairs, num_before)
        longest = int(min(longest, known, self._most_prefill - self.num_prefill))
        if longest < min(LEAST_CHUNK, num_left):
            return 0 if self.num_prefill else LEAST_CHUNK
        return longest

    def take_chunk(self, sequence: Sequence, most: int) -> int:
        """Takes the next tokens of a sequence into the step; returns how many, 0 if there is no room."""
        left = sequence.num_unscheduled
        longest = self._longest_chunk(sequence, sequence.num_scheduled, left)
        num_new = min(most, left, self.room(sequence.lane), longest)
        if self._limits.indivisible and num_new < left:
            num_new = 0 if self.num_prefill else left
        if num_new <= 0:
            return 0
        is_scored = sequence.wants_prompt_logprobs
        if self._time_left_s is not None:
            self._time_left_s -= self._cost.chunk_s(num_new, sequence.num_scheduled, is_scored=is_scored)
        self._num_scored += num_new if is_scored else 0
        self.tokens_left = max(0, self.tokens_left - num_new)
        if sequence.lane:
            self.lower_left = max(0, self.lower_left - num_new)
        self.num_prefill += num_new
        self._num_chunks += 1
        self._num_last_chunks += num_new == left
        self._chunk_kv_tokens += sequence.num_scheduled + num_new
        # Where steps have a target time, one with an interactive prompt is not filled up with prompts of other lanes: a
        # person waits for it.
        self._has_urgent |= sequence.lane is Lane.INTERACTIVE
        self._pairs += chunk_pairs(num_new, sequence.num_scheduled)
        return num_new

    def load(self, num_padding: int) -> StepLoad:
        """What the step will cost, in terms of the cost model."""
        return StepLoad(
            num_tokens=self.num_decode + self.num_prefill + self.num_in_runs + num_padding,
            decode_kv_tokens=self.decode_kv_tokens,
            chunk_pairs=self._pairs,
            num_sequences=self.num_decode + self._num_chunks,
            num_scored=self._num_scored,
            chunk_tokens=self.num_prefill,
            chunk_kv_tokens=self._chunk_kv_tokens,
            num_sampled=self.num_decode + self._num_last_chunks + self._num_sampled_in_runs,
        )
