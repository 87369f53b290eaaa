"""The running sequences: the blocks they hold, what executors have yet to be told of them, and their preemption.

Steps may be planned before earlier ones are committed, so a sequence that leaves may still be written by a step in
flight. Its blocks are retiring until that step is committed.
"""

from bisect import insort
from collections import Counter, deque
from operator import attrgetter

from trunkline_worker.cache.blocks import ComputingPrefixes, KVBlocks
from trunkline_worker.cache.sequence import Sequence, StepMark
from trunkline_worker.scheduler.batching import ContinuousBatching
from trunkline_worker.scheduler.deadlines import DrainRate
from trunkline_worker.scheduler.stats import EngineStats
from trunkline_worker.scheduler.step_cost import StepLoad
from trunkline_worker.scheduler.waiting import Waiting
from trunkline_worker.step.plan import SequenceStart, StepPlan

# Preempting is a last resort: if more sequences have to go in one step, the rest goes in the next.
MAX_PREEMPTIONS_PER_STEP = 8


class StepsInFlight:
    """Plans that have been made and not committed, oldest first, with what each should cost."""

    def __init__(self) -> None:
        self.latest_id = 0  # step_id of the latest plan, in flight or committed
        self.loads: dict[int, StepLoad] = {}  # by step_id
        self.plans: deque[StepPlan] = deque()

    def __bool__(self) -> bool:
        return bool(self.plans)

    def add(self, plan: StepPlan, load: StepLoad) -> None:
        self.latest_id = plan.step_id
        self.plans.append(plan)
        self.loads[plan.step_id] = load

    def take(self, plan: StepPlan) -> StepLoad:
        """Removes the oldest plan, which is committed now, and returns its load."""
        assert plan is self.plans[0], "commit in order"
        self.plans.popleft()
        return self.loads.pop(plan.step_id)

    def writes(self, step_id: int) -> bool:
        """Whether a step is still in flight, and so may write the blocks of its sequences."""
        return bool(self.plans) and step_id >= self.plans[0].step_id


class RunningSet:
    """Sequences join() it from the waiting queue and leave() it when they end or are preempted."""

    def __init__(
        self,
        *,
        blocks: KVBlocks,
        waiting: Waiting,
        batching: ContinuousBatching,
        in_flight: StepsInFlight,
        drain_rate: DrainRate,
        stats: EngineStats,
    ) -> None:
        self.members: list[Sequence] = []  # by rank; others only read it
        self.kv_tokens = 0  # context lengths of the members, summed, as of the latest plan
        self.changes = 0  # grows whenever a waiting sequence that did not fit may fit
        # Sequences, by id, for which a proposer or masker has raised an exception: the engine ends them.
        self.faults: list[tuple[int, Exception]] = []
        self._blocked_at = -1  # `changes` when no waiting sequence was found to fit
        self._blocks = blocks
        self._waiting = waiting
        self._batching = batching
        self._in_flight = in_flight
        self._drain_rate = drain_rate
        self._stats = stats
        self._prefixes = ComputingPrefixes(blocks)
        # Block tables of sequences that have left, by the step in flight that still writes them.
        self._retiring: dict[int, list[list[int]]] = {}
        self._ended: list[int] = []  # ids whose rows executors still have to forget
        self._starts: dict[int, SequenceStart] = {}  # rows that executors have not been told of, by id
        self._admitted: list[tuple[int, float, float]] = []  # since take_admitted() was last called

    @property
    def is_retiring(self) -> bool:
        """Whether blocks of sequences that have left are still written by a step in flight."""
        return bool(self._retiring)

    @property
    def num_retiring_blocks(self) -> int:
        """Blocks that will be available when the steps in flight are committed."""
        return sum(self._blocks.num_freed_by(table) for tables in self._retiring.values() for table in tables)

    @property
    def has_starts(self) -> bool:
        """Whether a sequence has joined since the latest plan."""
        return bool(self._starts)

    @property
    def is_blocked(self) -> bool:
        """Whether no waiting sequence fits, and nothing has changed since that was found out."""
        return self._blocked_at == self.changes

    def note_blocked(self) -> None:
        """No waiting sequence fits: they are not looked at until the next note_change()."""
        self._blocked_at = self.changes

    def note_change(self) -> None:
        """Waiting sequences that did not fit are looked at again."""
        self.changes += 1

    def is_settled(self, sequence: Sequence) -> bool:
        """Whether a running sequence takes part in the step that is being planned, or has just joined."""
        return sequence.last_step > self._in_flight.latest_id or sequence.sequence_id in self._starts

    def computes_next_of(self, sequence: Sequence) -> bool:
        """Whether a running sequence is about to compute the prefix that a waiting one needs next. Looks up the cached
        prefix of the waiting one, as Admission.fits() requires."""
        found = self._blocks.match(sequence)
        self._waiting.has_matched(sequence, found * self._blocks.block_size)
        return self._prefixes.covers_next(sequence, found)

    def join(self, sequence: Sequence, now_s: float) -> None:
        """Moves a waiting sequence into the running set. It must fit."""
        waiting = self._waiting
        waiting.remove(sequence)
        waiting.admitted_s[sequence.lane] = now_s
        self._blocks.admit(sequence)
        insort(self.members, sequence, key=attrgetter("rank"))
        self._stats.admitted(sequence, now_s)
        account = sequence.account
        waiting.lanes[sequence.lane].start(account)
        sequence.has_yielded = False
        sequence.len_at_admission = len(sequence.token_ids)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(sequence.num_computed, sequence.prompt_len)
            sequence.admitted_s = now_s
            account.cached_tokens += sequence.num_computed
            sequence.num_charged = sequence.num_computed
            self._admitted.append((sequence.sequence_id, now_s, sequence.awaited_s))
            self._drain_rate.admitted(sequence.lane, now_s)
        if sequence.wants_prompt_logprobs:
            sequence.prompt_logprobs = []
        self._batching.joined(sequence)
        self._prefixes.announce(sequence)
        self._starts[sequence.sequence_id] = SequenceStart(
            sequence.sequence_id,
            token_ids=list(sequence.token_ids),
            prompt_len=sequence.prompt_len,
            block_table=list(sequence.block_table),
            sampling=sequence.sampling,
        )

    def leave(self, sequence: Sequence) -> None:
        """Takes a sequence out. Its blocks are free once no step in flight writes them."""
        self._prefixes.withdraw(sequence)
        sequence.num_announced = 0
        self.members.remove(sequence)
        self._waiting.lanes[sequence.lane].stop(sequence.account)
        if self._starts.pop(sequence.sequence_id, None) is None:
            self._ended.append(sequence.sequence_id)
        table = self._blocks.detach(sequence)
        if self._in_flight.writes(sequence.last_step):
            self._retiring.setdefault(sequence.last_step, []).append(table)
        else:
            self._blocks.free(table)
        self.note_change()

    def publish(self, sequence: Sequence, num_computed: int) -> None:
        """Counts computed tokens, and shares the blocks that they filled."""
        self._prefixes.withdraw(sequence, until=num_computed // self._blocks.block_size)
        sequence.num_computed = num_computed
        self._blocks.publish(sequence)

    def free_retired(self, step_id: int) -> None:
        """Frees the blocks that only a step which is now committed still wrote."""
        for table in self._retiring.pop(step_id, ()):
            self._blocks.free(table)
            self.note_change()

    def take_starts(self) -> list[SequenceStart]:
        """Rows that executors have not been told of; called once for each plan."""
        starts, self._starts = list(self._starts.values()), {}
        return starts

    def take_ended(self) -> list[int]:
        """Ids of the rows that executors are to forget; called once for each plan."""
        ended, self._ended = self._ended, []
        return ended

    def take_admitted(self) -> list[tuple[int, float, float]]:
        """Ids of the sequences admitted for the first time since the last call, when each was, and how long it awaited
        resources before."""
        admitted, self._admitted = self._admitted, []
        return admitted

    def check_integrity(self) -> None:
        """Asserts that blocks and counters agree. See KVBlocks.check_integrity()."""
        retiring = [table for tables in self._retiring.values() for table in tables]
        self._blocks.check_integrity([*(sequence.block_table for sequence in self.members), *retiring])
        assert self.members == sorted(self.members, key=attrgetter("rank")), "the running set is out of order"
        self._prefixes.check_integrity(self.members)
        most_pending: Counter[int] = Counter()
        for plan in self._in_flight.plans:
            for index, step in enumerate(plan.steps):
                most_pending[step.sequence_id] += plan.runs[index].num_new if index in plan.runs else step.samples
        for sequence in self.members:
            known = len(sequence.token_ids) + sequence.num_pending
            assert sequence.num_computed <= sequence.num_scheduled <= known, "counters out of order"
            assert sequence.num_pending <= most_pending[sequence.sequence_id], "a token is lost"
            if not self._in_flight:
                assert sequence.num_computed == sequence.num_scheduled, "what no step computes is scheduled"


class Evictions:
    """Carries out the preemptions of a step: the blocks of a sequence go back to the pool, and it to the queue."""

    def __init__(self, running: RunningSet, waiting: Waiting, stats: EngineStats) -> None:
        self._running = running
        self._waiting = waiting
        self._stats = stats
        self.left = MAX_PREEMPTIONS_PER_STEP  # in this step
        self._preempted: list[int] = []  # ids, since take_preempted() was last called

    @property
    def has_any(self) -> bool:
        """Whether a sequence was preempted in this step."""
        return self.left < MAX_PREEMPTIONS_PER_STEP

    def begin_step(self) -> None:
        """Called before each step."""
        self.left = MAX_PREEMPTIONS_PER_STEP

    def take_preempted(self) -> list[int]:
        """Ids of the sequences preempted since the last call, each as often as it was."""
        if not self._preempted:
            return []
        preempted, self._preempted = self._preempted, []
        return preempted

    def evict(self, sequence: Sequence) -> None:
        """Takes a running sequence's blocks and puts it back into the queue."""
        self.left -= 1
        self._stats.preempted(sequence.num_scheduled)
        self._preempted.append(sequence.sequence_id)
        sequence.num_evicted = max(sequence.num_evicted, sequence.num_computed)
        if sequence.last_token is not None:
            sequence.last_token = StepMark(*sequence.last_token)  # its next token does not simply follow
        sequence.num_charged = max(sequence.num_charged, sequence.num_scheduled)
        self._running.leave(sequence)
        sequence.generation += 1
        sequence.promised_len = 0
        self._waiting.put_back(sequence)

    def may_evict(self, sequence: Sequence) -> bool:
        """Whether a running sequence may be preempted: neither an aged one nor one that the current step has settled
        on."""
        return not sequence.is_aged and not self._running.is_settled(sequence)

    def of_lower_lanes(self, sequence: Sequence) -> list[Sequence]:
        """Running sequences of lower lanes that may be preempted for this one."""
        return [s for s in self._running.members if s.lane > sequence.lane and self.may_evict(s)]
