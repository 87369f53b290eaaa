"""Decides, step by step, which tokens of which sequences are computed. Pure: time comes in as a number, and nothing
here knows of a device or a socket.

A step is filled in this order, under one token budget: sequences with one token to go, by rank; then, lane by lane,
chunks of prompts that have been begun, and waiting sequences. Chunks are cut so that the step stays under the time
that is set for it (step_cost.py). Who waits, and who of them is next: waiting.py and fair_share.py. Whether it fits:
admission.py.

When the pool runs dry a sequence of lower rank is preempted: its blocks go (they stay reusable until taken) and it
computes again later. Nothing is admitted in a step that preempted for growth. The highest rank always gets on, and a
sequence never outgrows an empty pool, because max_tokens is bounded by it at submission.
"""

from enum import Enum

from trunkline_worker.cache.blocks import KVBlocks
from trunkline_worker.cache.sequence import Sequence
from trunkline_worker.lanes.fair_share import Account
from trunkline_worker.lanes.lanes import LANES, Lane
from trunkline_worker.pace.limits import SchedulerLimits
from trunkline_worker.pace.step_budget import StepBudget
from trunkline_worker.queue.begun_prompts import BegunPrompts
from trunkline_worker.scheduling.guest import GuestTurn
from trunkline_worker.scheduling.preemption import Preemption
from trunkline_worker.scheduling.repeats import Repeats
from trunkline_worker.scheduling.running_set import RunningSet
from trunkline_worker.scheduling.stats import EngineStats
from trunkline_worker.step.plan import SequenceStep, StepPlan

# Waiting sequences looked at in one step past the first that cannot start because another one is just computing
# its prefix: bounds the cost of a step when very many wait for one prefix.
MAX_DEFERRED = 64
# Of one tenant: then the next one's are looked at. So one tenant's sequences that wait for a prefix hide no others.
MAX_DEFERRED_OF_TENANT = 16
NOBODY: frozenset[Account] = frozenset()
# What a guest gets of each step before all others, as a divisor of the step's tokens.
GUEST_SHARE = 8


class Stopped(Enum):
    """Why no more of a lane was admitted."""

    NOBODY_WAITS = 0
    STEP_FULL = 1  # the step is full, or they wait for a prefix
    BY_FORECAST = 2  # the next one fits now, but its lane would outgrow the pool
    BY_ROOM_NOW = 3  # the next one does not fit, so nobody of a lower lane takes what it waits for


class Scheduler(RunningSet):
    """schedule() → plan → (executor) → commit(plan, result)."""

    def __init__(self, limits: SchedulerLimits, blocks: KVBlocks, stats: EngineStats) -> None:
        super().__init__(limits, blocks, stats)
        self.prompt_backlog = [0 for _ in LANES]  # tokens of running sequences' prompts that no step was given yet
        self._guest_turn = GuestTurn(self)
        self._preemption = Preemption(self)
        self.repeats = Repeats(self, self._guest_turn)
        self._deferred_members: set[int] = set()  # of a batch being formed: ids
        self._planned_s = float("-inf")  # when a step was planned last
        self._looked_s = float("-inf")  # when those who wait were looked at last

    def wakes_s(self) -> float | None:
        """When time alone changes what schedule() would do; None: never."""
        if not len(self.waiting):
            return None
        times_s = [self.deadlines.next_s(), self.hurries_from_s(self._planned_s), self._changes_s()]
        if self.gate.is_open_always:
            times_s.append(self._guest_turn.next_s())
        elif not self.running:
            times_s.append(self.gate.opens_s(self.waiting))
        return min([time_s for time_s in times_s if time_s is not None], default=None)

    def _changes_s(self) -> float | None:
        """When tenants' shares are looked at again."""
        return self._preemption.sharing.changes_s(self._looked_s) if self.gate.is_open_always else None

    def schedule(self, now_s: float) -> StepPlan | None:
        """The next step, or None if there is nothing to compute now."""
        self._guest_turn.end_if_over()
        if len(self.waiting):
            for time_s in (self.hurries_from_s(self._planned_s), self._changes_s()):
                if time_s is not None and now_s >= time_s:
                    self.something_changed()
        if not self.is_blocked:
            self._looked_s = now_s
        self._planned_s = now_s
        self.gate.open(self.waiting, busy=bool(self.running or self._retiring), now_s=now_s)
        budget = StepBudget(self.limits, self.cost)
        steps: list[SequenceStep] = []
        self._preemption.begin_step(now_s)
        preemptions_before = self.stats.preemptions
        chunks = self._schedule_decodes(steps, budget)
        may_admit = self.stats.preemptions == preemptions_before
        budget.decodes_are_in()
        self._schedule_prompts(steps, chunks, budget, now_s, may_admit=may_admit)
        self.drain_rate.step_over(self.waiting.count, now_s)
        if not steps and self.gate.holds_decodes_until_prompts_are_done:
            # The batch is complete after all. Who waits for a prefix that a member computes would wait for ever.
            if any(sequence.num_unscheduled == 1 for sequence in self.running):
                self.gate.close()
            self._schedule_decodes(steps, budget)
        if not steps:
            return None
        padding = None
        if not self.gate.is_open_always:
            contexts = [step.num_computed + 1 for step in steps if step.num_new == 1]
            padding = self.gate.padding(budget.tokens_left, contexts)
        self.step_id += 1
        ended, self._ended = self._ended, []
        starts, self.starts = list(self.starts.values()), {}
        plan = StepPlan(self.step_id, steps, starts, ended, padding)
        self.in_flight.append(plan)
        self.loads[plan.step_id] = budget.load(plan.num_padding)
        return plan

    def _schedule_decodes(self, steps: list[SequenceStep], budget: StepBudget) -> list[Sequence]:
        """Gives every sequence that is one token behind its token; returns those that are further behind."""
        chunks: list[Sequence] = []
        step_id, block_size = self.step_id + 1, self.blocks.block_size
        tokens_left, lower_left, kv_tokens = budget.tokens_left, budget.lower_left, 0
        order = self.running.copy()
        if self.blocks.num_available < 2 * len(order) and self._preemption.sharing.contended():
            order = self._preemption.sharing.order(order)
        guest = self._guest_turn.current()
        if guest is not None:
            order.remove(guest)
            order.insert(0, guest)
        hold = self.gate.holds_decodes_until_prompts_are_done and (
            self.gate.is_forming or any(sequence.num_unscheduled > 1 for sequence in order)
        )
        for sequence in order:
            start, pending = sequence.num_scheduled, sequence.num_pending
            behind = len(sequence.token_ids) + pending - start
            if behind != 1:
                if behind > 1 and sequence.block_table:
                    chunks.append(sequence)
                continue
            lower = sequence.account.lane
            if start >= sequence.last_to_compute or not tokens_left or (lower and not lower_left) or hold:
                continue
            new_blocks: list[int] | tuple[()] = ()
            if start >= len(sequence.block_table) * block_size:
                if not sequence.block_table or not self._preemption.can_grow(sequence):
                    continue
                new_blocks = self.blocks.grow(sequence, 1)
            steps.append(SequenceStep(sequence.sequence_id, sequence.generation, start, 1, new_blocks, True))
            sequence.num_scheduled = start + 1
            sequence.num_pending = pending + 1
            sequence.last_step = step_id
            tokens_left -= 1
            if lower:
                lower_left -= 1
            kv_tokens += start + 1
        budget.num_decode, budget.decode_kv_tokens = len(steps), kv_tokens
        budget.tokens_left, budget.lower_left = tokens_left, lower_left
        return [sequence for sequence in chunks if sequence.block_table]  # some may have been preempted since

    def _schedule_prompts(
        self,
        steps: list[SequenceStep],
        chunks: list[Sequence],
        budget: StepBudget,
        now_s: float,
        *,
        may_admit: bool,
    ) -> None:
        """Fills the rest of the step: the guest's share, then lane by lane what has been begun and what waits."""
        threshold = self.limits.long_prefill_threshold
        most = threshold if threshold and len(chunks) + len(self.waiting) > 1 else self.limits.max_step_tokens
        guest = self._guest_turn.find(chunks, now_s)
        guest_waits = self.is_guest_blocked
        if guest is not None:
            share = max(1, self.limits.max_step_tokens // GUEST_SHARE)
            if may_admit and guest in self.waiting:
                guest_waits = not self._guest_turn.let_in(guest, now_s)
            if guest.block_table:
                self._chunk(guest, min(most, share, budget.guest_tokens(guest, GUEST_SHARE)), steps, budget)
                chunks = [sequence for sequence in chunks if sequence is not guest]
        if guest_waits:
            # Nobody overtakes it; the interactive lane is held up only if it alone is in the guest's way.
            may_admit = may_admit and any(sequence.lane is not Lane.INTERACTIVE for sequence in self.running)
        may_admit = may_admit and not self.is_blocked and len(self.waiting) > 0
        # Whether everybody who waits was found not to fit, and nothing is on its way that could change that.
        blocked = may_admit and not guest_waits and self.gate.is_open_always
        self.admission.is_cautious = False
        for lane in LANES:
            self.waiting.lanes[lane].begun = NOBODY
            if not (chunks or may_admit):
                continue
            begun = BegunPrompts([s for s in chunks if s.account.lane is lane and s.block_table])
            stopped = self._fill(lane, begun, most, steps, budget, now_s, may_admit=may_admit)
            if may_admit:
                blocked &= stopped is not Stopped.STEP_FULL
                may_admit = stopped is not Stopped.BY_ROOM_NOW and not guest_waits
        coming = self._retiring or self._preemption.has_happened or self.admission.is_cautious
        if blocked and len(self.waiting) and not coming:
            self.is_blocked = True
        self._count_backlog(budget, has_prompts=bool(chunks or self.starts))

    def _count_backlog(self, budget: StepBudget, *, has_prompts: bool) -> None:
        """What the step leaves to be done for prompts, for load samples."""
        self.running_kv_tokens, self.prompt_backlog = budget.decode_kv_tokens, [0 for _ in LANES]
        if has_prompts:
            self.running_kv_tokens = sum(len(sequence.token_ids) for sequence in self.running)
            for sequence in self.running:
                behind = len(sequence.token_ids) - sequence.num_scheduled  # negative where a step runs ahead of a token
                self.prompt_backlog[sequence.account.lane] += max(0, behind)

    def _chunk(self, sequence: Sequence, most: int, steps: list[SequenceStep], budget: StepBudget) -> None:
        num_new = budget.take_chunk(sequence, most)
        if not num_new:
            return
        samples = num_new == sequence.num_unscheduled
        start = sequence.num_scheduled
        steps.append(SequenceStep(sequence.sequence_id, sequence.generation, start, num_new, (), samples))
        sequence.num_scheduled += num_new
        sequence.num_pending += samples
        sequence.last_step = self.step_id + 1
        account = sequence.account
        if samples and account.running == 1 and self.waiting.lanes[account.lane].num_active > 1:
            budget.hasten()
        # It counts as it is computed, not all at once: nobody pays for the rest of a long prompt that is just begun.
        again = min(num_new, max(0, sequence.num_charged - start))
        sequence.account.recomputed_tokens += again
        sequence.account.input_tokens += num_new - again
        sequence.num_charged = max(sequence.num_charged, sequence.num_scheduled)

    def _fill(
        self,
        lane: Lane,
        begun: BegunPrompts,
        most: int,
        steps: list[SequenceStep],
        budget: StepBudget,
        now_s: float,
        *,
        may_admit: bool,
    ) -> Stopped:
        """Fills a step with a lane's prompts: those that have been begun and, where it may admit, those of sequences
        that wait; the tenant with the least service first, and what it has begun before what waits."""
        deferred, unfinished = 0, set()
        stopped, hurries = Stopped.NOBODY_WAITS, self.hurries(lane, now_s)
        makes_room_in = self._preemption.sharing.makes_room_in
        if makes_room_in is not None and lane >= makes_room_in:
            may_admit, stopped = False, Stopped.BY_ROOM_NOW
        while True:
            sequence = self._next(lane) if may_admit else None
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
            if self.waits_for_prefix(sequence):
                self._defer(sequence, deferred)
                deferred += 1
                continue
            if not budget.can_begin(sequence):
                may_admit, stopped = False, Stopped.STEP_FULL
                continue
            may_hurry = hurries and self._preemption.sharing.may_stretch(sequence)
            if not self.admission.fits(sequence, self.running, hurries=may_hurry):
                # Where the pool has room for it now, but not for what all of its lane will need, lower lanes may use
                # what is free: they give it back when it is wanted.
                foreseen = self.admission.has_room_now(sequence, self.running) and self.gate.is_open_always
                may_admit, stopped = False, Stopped.BY_FORECAST if foreseen else Stopped.BY_ROOM_NOW
                self.gate.close()
                continue
            self.join(sequence, now_s)
            self._preemption.sharing.joined(lane)
            self._chunk(sequence, most, steps, budget)
            if sequence.num_scheduled < len(sequence.token_ids):
                unfinished.add(sequence.account)
        self._restore()
        self.waiting.lanes[lane].begun = unfinished
        return Stopped.STEP_FULL if deferred else stopped

    def _next(self, lane: Lane) -> Sequence | None:
        """Who is to be admitted next, apart from those deferred."""
        if self.gate.is_open_always:
            return self.waiting.next(lane)
        members = self.gate.expected(lane, self.waiting)
        return next((s for s in members if s.sequence_id not in self._deferred_members), None)

    def _defer(self, sequence: Sequence, num_deferred: int) -> None:
        """Passes over one that waits for a prefix; past every so many, over all of its tenant."""
        if self.gate.is_open_always:
            if (num_deferred + 1) % MAX_DEFERRED_OF_TENANT:
                self.waiting.defer(sequence)
            else:
                self.waiting.pass_over(sequence.lane)
        else:
            self._deferred_members.add(sequence.sequence_id)

    def _restore(self) -> None:
        self.waiting.restore()
        self._deferred_members.clear()

    def refuse_hopeless(self, now_s: float) -> list[Sequence]:
        """Takes out what waits and cannot meet its deadline any more."""
        refused = []
        while (sequence := self.deadlines.hopeless(now_s)) is not None:
            self._remove(sequence)
            self.stats.expired(sequence)
            refused.append(sequence)
        return refused

    def check_integrity(self) -> None:
        super().check_integrity()
        self._guest_turn.check_integrity()


def _goes_on_before(begun: Sequence, waiting: Sequence) -> bool:
    """Whether a begun prompt goes before a sequence that waits: where both are of one tenant, or its own was served
    less."""
    return begun.account is waiting.account or begun.account.virtual_tokens < waiting.account.virtual_tokens
