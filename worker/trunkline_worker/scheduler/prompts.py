"""The prompts of a step: chunks of prompts that have been begun, and prompts of waiting sequences that are admitted."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from trunkline_worker.cache.sequence import Sequence
from trunkline_worker.scheduler.admission import Admission
from trunkline_worker.scheduler.aging import Aging, Overdue
from trunkline_worker.scheduler.batching import ContinuousBatching
from trunkline_worker.scheduler.lane_sharing import LaneSharing
from trunkline_worker.scheduler.limits import SchedulerLimits
from trunkline_worker.scheduler.running_set import Evictions, RunningSet, StepsInFlight
from trunkline_worker.scheduler.runs import RunScheduling
from trunkline_worker.scheduler.step_budget import StepBudget
from trunkline_worker.scheduler.waiting import Waiting
from trunkline_worker.step.fair_share import Account
from trunkline_worker.step.lanes import LANES, Lane
from trunkline_worker.step.plan import SequenceStep

# Waiting sequences that are looked at in one step after the first that cannot start because a running sequence is
# computing its prefix. Bounds the cost of a step when very many wait for one prefix.
MAX_DEFERRED = 64
EMPTY: frozenset[Account] = frozenset()
# What an aged sequence gets of each step before all others, as a divisor of the step's tokens.
AGED_SHARE = 8


class BegunPrompts:
    """Prompts of one lane that are partly computed. The tenant with the least service goes first, and within a tenant
    the oldest prompt."""

    def __init__(self, sequences: Iterable[Sequence]) -> None:
        """sequences: by rank"""
        self._by_account: dict[Account, deque[Sequence]] = {}
        for sequence in sequences:
            self._by_account.setdefault(sequence.account, deque()).append(sequence)

    def first(self) -> Sequence | None:
        """The prompt that continues next; None if there is none left."""
        if not self._by_account:
            return None
        account = min(self._by_account, key=lambda account: account.virtual_tokens)
        return self._by_account[account][0]

    def remove(self, sequence: Sequence) -> None:
        """Removes the first prompt, which has had its turn."""
        prompts = self._by_account[sequence.account]
        assert prompts.popleft() is sequence, "only the first prompt of a tenant can have its turn"
        if not prompts:
            del self._by_account[sequence.account]


class Stopped(Enum):
    """Why no more sequences of a lane were admitted."""

    QUEUE_EMPTY = 0
    STEP_FULL = 1  # the step is full, or the waiting sequences wait for a prefix
    BY_FORECAST = 2  # the next sequence fits now, but its lane would outgrow the pool
    BY_ROOM_NOW = 3  # the next sequence does not fit: lower lanes must not use the blocks it is waiting for


@dataclass(slots=True, eq=False, kw_only=True)
class PromptScheduling:
    """Fills what decodes leave of a step."""

    limits: SchedulerLimits
    running: RunningSet
    waiting: Waiting
    batching: ContinuousBatching
    in_flight: StepsInFlight
    admission: Admission
    overdue: Overdue
    evictions: Evictions
    sharing: LaneSharing
    aging: Aging
    runs: RunScheduling
    # By lane: tokens of running prompts that no step was given yet.
    backlog: list[int] = field(default_factory=lambda: [0 for _ in LANES], init=False)

    def fill(
        self, steps: list[SequenceStep], chunks: list[Sequence], budget: StepBudget, now_s: float, *, may_admit: bool
    ) -> None:
        """Fills the rest of the step: the aged sequence's share, then lane by lane begun prompts and waiting
        sequences."""
        running, waiting, aging = self.running, self.waiting, self.aging
        admits_while_running = self.batching.admits_while_running
        most = self.limits.max_step_tokens
        aged = aging.find(chunks, now_s) if admits_while_running else None
        aged_waits = aging.is_blocked
        if aged is not None:
            share = max(1, self.limits.max_step_tokens // AGED_SHARE)
            if may_admit and aged in waiting:
                aged_waits = not aging.admit(aged, now_s)
            if aged.block_table:
                self._chunk(aged, min(most, share, budget.aged_tokens(aged, AGED_SHARE)), steps, budget)
                chunks = [sequence for sequence in chunks if sequence is not aged]
        if aged_waits:
            # No sequence overtakes it; the interactive lane is held up only if it alone is in the aged one's way.
            may_admit = may_admit and any(sequence.lane is not Lane.INTERACTIVE for sequence in running.members)
        may_admit = may_admit and not running.is_blocked and waiting.num_ready > 0
        # Whether no waiting sequence was found to fit, and nothing in flight could change that.
        blocked = may_admit and not aged_waits and admits_while_running
        self.admission.is_cautious = False
        for lane in LANES:
            waiting.lanes[lane].begun = EMPTY
            if not (chunks or may_admit):
                continue
            begun = BegunPrompts([s for s in chunks if s.account.lane is lane and s.block_table])
            stopped = self._fill_lane(lane, begun, steps, budget, most=most, now_s=now_s, may_admit=may_admit)
            if may_admit:
                blocked &= stopped is not Stopped.STEP_FULL
                may_admit = stopped is not Stopped.BY_ROOM_NOW and not aged_waits
        may_change = running.is_retiring or self.evictions.has_any or self.admission.is_cautious
        may_change |= self.sharing.fitted is not None and self.sharing.fitted in waiting
        if blocked and waiting.num_ready and not may_change:
            running.note_blocked()
        self._count_backlog(budget, has_prompts=bool(chunks or running.has_starts))

    def _count_backlog(self, budget: StepBudget, *, has_prompts: bool) -> None:
        """Counts the prompt tokens that the step leaves to be computed, for load samples."""
        kv_tokens, self.backlog = budget.decode_kv_tokens, [0 for _ in LANES]
        if has_prompts:
            kv_tokens = sum(len(sequence.token_ids) for sequence in self.running.members)
            for sequence in self.running.members:
                behind = len(sequence.token_ids) - sequence.num_scheduled  # negative where a step runs ahead of a token
                self.backlog[sequence.account.lane] += max(0, behind)
        self.running.kv_tokens = kv_tokens

    def _chunk(self, sequence: Sequence, most: int, steps: list[SequenceStep], budget: StepBudget) -> None:
        num_new = budget.take_chunk(sequence, most)
        if not num_new:
            return
        samples = num_new == sequence.num_unscheduled
        start = sequence.num_scheduled
        steps.append(SequenceStep(sequence.sequence_id, sequence.generation, start, num_new, (), samples))
        sequence.num_scheduled += num_new
        sequence.num_pending += samples
        sequence.last_step = self.in_flight.latest_id + 1
        account = sequence.account
        if samples and account.running == 1 and self.waiting.lanes[account.lane].num_active > 1:
            budget.hasten()
        # Tokens are charged as they are computed: a tenant does not pay for the rest of a prompt that is just begun.
        again = min(num_new, max(0, sequence.num_charged - start))
        sequence.account.recomputed_tokens += again
        sequence.account.input_tokens += num_new - again
        sequence.num_charged = max(sequence.num_charged, sequence.num_scheduled)
        if samples and self.runs.proposer is not None:
            self.runs.extend(sequence, len(steps) - 1, steps, budget)

    def _fill_lane(
        self,
        lane: Lane,
        begun: BegunPrompts,
        steps: list[SequenceStep],
        budget: StepBudget,
        *,
        most: int,
        now_s: float,
        may_admit: bool,
    ) -> Stopped:
        """Fills a step with a lane's prompts: those that have been begun and, where it may admit, those of waiting
        sequences. The tenant with the least service goes first, and its begun prompts before its waiting ones."""
        deferred, unfinished = 0, set()
        stopped, lane_is_overdue = Stopped.QUEUE_EMPTY, self.overdue.is_overdue(lane, now_s)
        batching, sharing, running = self.batching, self.sharing, self.running
        makes_room_in = sharing.makes_room_in
        if makes_room_in is not None and lane >= makes_room_in:
            may_admit, stopped = False, Stopped.BY_ROOM_NOW
        while True:
            sequence = batching.next(lane) if may_admit else None
            if (prompt := begun.first()) is not None and (sequence is None or _goes_on_before(prompt, sequence)):
                self._chunk(prompt, most, steps, budget)
                begun.remove(prompt)
                if prompt.num_scheduled < len(prompt.token_ids):
                    unfinished.add(prompt.account)
                continue
            if sequence is None:
                break
            if not budget.room(lane) or deferred == MAX_DEFERRED:
                may_admit, stopped = False, Stopped.STEP_FULL
                continue
            if running.computes_next_of(sequence):
                batching.defer(sequence)
                deferred += 1
                continue
            if not budget.can_begin(sequence):
                may_admit, stopped = False, Stopped.STEP_FULL
                continue
            is_overdue = lane_is_overdue and sharing.may_stretch(sequence)
            if not self.admission.fits(sequence, running.members, is_overdue=is_overdue):
                # Where the pool has room for it now, but not for what all of its lane will need, lower lanes may use
                # the free blocks: they give them back when they are needed.
                has_room = self.admission.has_room_now(sequence, running.members)
                may_admit, stopped = False, Stopped.BY_FORECAST if has_room else Stopped.BY_ROOM_NOW
                batching.close()
                continue
            running.join(sequence, now_s)
            sharing.joined(lane)
            self._chunk(sequence, most, steps, budget)
            if sequence.num_scheduled < len(sequence.token_ids):
                unfinished.add(sequence.account)
        batching.restore()
        self.waiting.lanes[lane].begun = unfinished
        return Stopped.STEP_FULL if deferred else stopped


def _goes_on_before(begun: Sequence, waiting: Sequence) -> bool:
    """Whether a begun prompt goes before a waiting sequence: it is of the same tenant, or of one that was served
    less."""
    return begun.account is waiting.account or begun.account.virtual_tokens < waiting.account.virtual_tokens
