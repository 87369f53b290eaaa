"""Decides, step by step, which tokens of which sequences are computed. Pure: no clock, no torch, no sockets.

Each step: running sequences first (those with one token to go before those in the middle of a long prompt), then
waiting ones in order of arrival, all under one token budget. When the pool runs dry the youngest running sequence is
preempted: its blocks go (they stay reusable until taken) and it computes again later. Precedence is strictly by
arrival and nothing is admitted in a step that preempted, so two sequences cannot evict one another forever: the
oldest always gets on. A sequence never outgrows an empty pool, because max_tokens is bounded by it at submission.
"""

from bisect import insort
from collections import Counter, deque
from dataclasses import dataclass, field
from operator import attrgetter

from trunkline.status import CODE_INTERNAL, INTERNAL, RequestRefused
from trunkline_worker.blocks import KVBlocks
from trunkline_worker.plan import PositionLogprobs, SequenceStart, SequenceStep, StepPlan, StepResult
from trunkline_worker.sequence import Finish, Sequence

# Waiting sequences looked at in one step past the first that cannot start because another one is just computing
# its prefix: bounds the cost of a step when very many wait for one prefix.
MAX_DEFERRED = 64


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Each at least 1."""

    max_step_tokens: int = 2048
    max_running_requests: int = 256
    max_waiting_requests: int = 1024


@dataclass(frozen=True, slots=True)
class PromptNews:
    """What is known of a prompt once its first output token is there."""

    num_tokens: int
    cached_tokens: int
    logprobs: list[PositionLogprobs] | None  # of prompt positions 1..


@dataclass(slots=True)
class SequenceNews:
    """What a step produced for one sequence."""

    sequence_id: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    finish: Finish | None = None
    stop_token_id: int | None = None
    prompt: PromptNews | None = None  # with the first output token
    error: RequestRefused | None = None


class Scheduler:
    """The running set, the waiting queue, and the blocks they hold.

    schedule() → plan → (executor) → commit(plan, result); abort() may come at any time, also between the two.
    """

    def __init__(self, limits: SchedulerLimits, blocks: KVBlocks) -> None:
        self.limits = limits
        self.blocks = blocks
        self.running: list[Sequence] = []  # by arrival
        self.waiting: deque[Sequence] = deque()  # by arrival
        self.waiting_tokens = 0  # known tokens of waiting sequences
        self.num_preemptions = 0
        self._sequences: dict[int, Sequence] = {}  # running and waiting, by id
        # Digest of each full block that a running sequence is about to compute → how many are about to.
        self._computing: dict[bytes, int] = {}
        self._step_id = 0
        self._in_flight: StepPlan | None = None
        self._release_after: list[Sequence] = []  # gone, but the step in flight still writes their blocks
        self._ended: list[int] = []  # rows that executors still have to forget

    # Asking

    @property
    def has_work(self) -> bool:
        """Whether there is something to schedule, or rows that executors should be told to forget."""
        return bool(self.running or self.waiting)

    def can_submit(self) -> bool:
        """Whether the waiting queue has room."""
        return len(self.waiting) < self.limits.max_waiting_requests

    # Acting

    def submit(self, sequence: Sequence) -> None:
        """Puts a sequence at the end of the queue. Its id must be new, its sampling bounded by the pool."""
        assert sequence.sequence_id not in self._sequences, "sequence ids are unique"
        self._sequences[sequence.sequence_id] = sequence
        self.waiting.append(sequence)
        self.waiting_tokens += len(sequence.token_ids)

    def abort(self, sequence_id: int) -> bool:
        """Drops a sequence wherever it is; its blocks are free at the next step boundary. False if it is gone."""
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            return False
        self._remove(sequence)
        return True

    def schedule(self) -> StepPlan | None:
        """The next step, or None if there is nothing to compute. The one before must have been committed."""
        assert self._in_flight is None, "one step at a time"
        budget = self.limits.max_step_tokens
        steps: list[SequenceStep] = []
        decoding = [sequence for sequence in self.running if sequence.num_uncomputed == 1]
        computing = [sequence for sequence in self.running if sequence.num_uncomputed > 1]
        preempted = False
        for sequence in decoding:
            if budget == 0 or not sequence.block_table:  # preempted by an older one in this very loop
                continue
            while not self.blocks.can_grow(sequence):
                self._preempt(victim := self.running[-1])
                preempted = True
                if victim is sequence:
                    break
            else:
                steps.append(self._step(sequence, 1, self.blocks.grow(sequence)))
                budget -= 1
        for sequence in computing:
            if budget == 0 or not sequence.block_table:  # preempted above
                continue
            num_new = min(sequence.num_uncomputed, budget)
            steps.append(self._step(sequence, num_new, []))
            budget -= num_new
        starts: list[SequenceStart] = []
        if not preempted:
            budget = self._admit(budget, steps, starts)
        ended, self._ended = self._ended, []
        if not steps:
            self._ended = ended
            return None
        self._step_id += 1
        self._in_flight = StepPlan(self._step_id, steps, starts, ended)
        return self._in_flight

    def commit(self, plan: StepPlan, result: StepResult) -> list[SequenceNews]:
        """Takes in what a step computed. Results for sequences that are gone or were preempted are dropped."""
        assert plan is self._in_flight, "commit in order"
        assert result.step_id == plan.step_id, "the result is of another step"
        self._in_flight = None
        for gone in self._release_after:
            self.blocks.release(gone)
        self._release_after.clear()
        news: list[SequenceNews] = []
        for index, step in enumerate(plan.steps):
            sequence = self._sequences.get(step.sequence_id)
            if sequence is None or sequence.generation != step.generation:
                continue
            self._advance(sequence, step.num_new)
            if sequence.prompt_logprobs is not None and index in result.prompt_logprobs:
                sequence.prompt_logprobs += result.prompt_logprobs[index]
            if step.samples:
                news.append(self._take_sample(sequence, index, result))
        return news

    # Parts of a step

    def _admit(self, budget: int, steps: list[SequenceStep], starts: list[SequenceStart]) -> int:
        """Moves waiting sequences into the running set while tokens, slots and blocks last; returns what is left."""
        deferred: list[Sequence] = []
        while (
            self.waiting
            and budget
            and len(self.running) < self.limits.max_running_requests
            and len(deferred) < MAX_DEFERRED
        ):
            sequence = self.waiting[0]
            matched = self.blocks.match(sequence)
            if self._is_being_computed(sequence, len(matched)):
                deferred.append(self.waiting.popleft())
                continue
            # A spare block for each running sequence keeps the newcomer from being preempted at once.
            if not self.blocks.can_admit(sequence, matched, reserve=len(self.running)):
                break
            self.waiting.popleft()
            self.waiting_tokens -= len(sequence.token_ids)
            self.blocks.admit(sequence, matched)
            insort(self.running, sequence, key=attrgetter("arrival"))
            if sequence.cached_tokens is None:
                sequence.cached_tokens = min(sequence.num_computed, sequence.prompt_len)
            if sequence.wants_prompt_logprobs:
                sequence.prompt_logprobs = []
            self._announce(sequence)
            starts.append(
                SequenceStart(
                    sequence.sequence_id,
                    list(sequence.token_ids),
                    sequence.prompt_len,
                    list(sequence.block_table),
                    sequence.sampling,
                )
            )
            num_new = min(sequence.num_uncomputed, budget)
            steps.append(self._step(sequence, num_new, []))
            budget -= num_new
        self.waiting.extendleft(reversed(deferred))
        return budget

    def _step(self, sequence: Sequence, num_new: int, new_blocks: list[int]) -> SequenceStep:
        return SequenceStep(
            sequence.sequence_id,
            sequence.generation,
            sequence.num_computed,
            num_new,
            new_blocks,
            samples=num_new == sequence.num_uncomputed,
        )

    def _take_sample(self, sequence: Sequence, index: int, result: StepResult) -> SequenceNews:
        news = SequenceNews(sequence.sequence_id)
        token_id = result.token_ids[index]
        if token_id is None:
            reason = result.errors.get(index, "the model gave no usable output")
            news.error = RequestRefused(CODE_INTERNAL, INTERNAL, reason)
            self._remove(sequence)
            return news
        if not sequence.reported:
            sequence.reported = True
            news.prompt = PromptNews(sequence.prompt_len, sequence.cached_tokens or 0, sequence.prompt_logprobs)
            sequence.prompt_logprobs = None
        sequence.token_ids.append(token_id)
        news.token_ids.append(token_id)
        if index in result.logprobs:
            news.logprobs.append(result.logprobs[index])
        sampling = sequence.sampling
        if token_id in sampling.end_token_ids and sequence.num_output > sampling.min_tokens:
            news.finish = Finish.STOP
            news.stop_token_id = token_id
        elif sequence.num_output >= sampling.max_tokens:
            news.finish = Finish.LENGTH
        if news.finish is not None:
            self._remove(sequence)
        return news

    def _preempt(self, sequence: Sequence) -> None:
        """Takes a running sequence's blocks and puts it back at its place in the queue."""
        self._withdraw(sequence)
        self.running.remove(sequence)
        self._ended.append(sequence.sequence_id)
        self.blocks.release(sequence)
        sequence.generation += 1
        insort(self.waiting, sequence, key=attrgetter("arrival"))
        self.waiting_tokens += len(sequence.token_ids)
        self.num_preemptions += 1

    def _remove(self, sequence: Sequence) -> None:
        """Takes a finished or aborted sequence out."""
        del self._sequences[sequence.sequence_id]
        if not sequence.block_table:
            self.waiting.remove(sequence)
            self.waiting_tokens -= len(sequence.token_ids)
            return
        self._withdraw(sequence)
        self.running.remove(sequence)
        self._ended.append(sequence.sequence_id)
        if self._in_flight is None:
            self.blocks.release(sequence)
        else:
            self._release_after.append(sequence)

    # Same-prefix arrivals: a prefix that one sequence is computing is not computed by another at the same time

    def _is_being_computed(self, sequence: Sequence, num_matched: int) -> bool:
        """Whether a running sequence is about to compute the first block that this one misses."""
        if not sequence.may_use_cache or (num_matched + 1) * self.blocks.block_size >= len(sequence.token_ids):
            return False
        return self.blocks.digest(sequence, num_matched) in self._computing

    def _announce(self, sequence: Sequence) -> None:
        """Makes known that a newly admitted sequence will compute the rest of its full blocks."""
        first = sequence.num_computed // self.blocks.block_size
        sequence.num_announced = len(sequence.token_ids) // self.blocks.block_size
        for index in range(first, sequence.num_announced):
            digest = self.blocks.digest(sequence, index)
            self._computing[digest] = self._computing.get(digest, 0) + 1

    def _withdraw(self, sequence: Sequence, until: int | None = None) -> None:
        """Takes announced blocks back: those before block `until`, or all that are left."""
        first = sequence.num_computed // self.blocks.block_size
        last = sequence.num_announced if until is None else min(until, sequence.num_announced)
        for index in range(first, last):
            digest = sequence.digests[index]
            if self._computing[digest] == 1:
                del self._computing[digest]
            else:
                self._computing[digest] -= 1

    def _advance(self, sequence: Sequence, num_new: int) -> None:
        """Counts computed tokens, and shares the blocks that they filled."""
        num_computed = sequence.num_computed + num_new
        self._withdraw(sequence, until=num_computed // self.blocks.block_size)
        sequence.num_computed = num_computed
        self.blocks.publish(sequence)

    def check_integrity(self) -> None:
        """Asserts that blocks, queues and counters agree; cheap enough for every step of a test. See KVBlocks."""
        self.blocks.check_integrity([*self.running, *self._release_after])
        assert {id(s) for s in (*self.running, *self.waiting)} == {id(s) for s in self._sequences.values()}
        for queue in (list(self.running), list(self.waiting)):
            assert queue == sorted(queue, key=attrgetter("arrival")), "a queue is out of order"
        assert self.waiting_tokens == sum(len(s.token_ids) for s in self.waiting), "waiting tokens miscounted"
        assert all(not s.block_table and s.num_computed == 0 for s in self.waiting), "a waiting sequence holds blocks"
        announced = Counter(
            sequence.digests[index]
            for sequence in self.running
            for index in range(sequence.num_computed // self.blocks.block_size, sequence.num_announced)
        )
        assert self._computing == announced, "blocks being computed miscounted"
