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

from bisect import insort
from enum import Enum
from operator import attrgetter

from trunkline_worker.admission import cheapest_victim, is_guest
from trunkline_worker.batch_gate import BatchGate
from trunkline_worker.blocks import KVBlocks
from trunkline_worker.drain_rate import DrainRate
from trunkline_worker.lanes import LANES, Lane
from trunkline_worker.limits import SchedulerLimits
from trunkline_worker.plan import SequenceStart, SequenceStep, StepPlan
from trunkline_worker.running_set import RunningSet
from trunkline_worker.sequence import Sequence
from trunkline_worker.stats import EngineStats
from trunkline_worker.step_budget import StepBudget

# Waiting sequences looked at in one step past the first that cannot start because another one is just computing
# its prefix: bounds the cost of a step when very many wait for one prefix.
MAX_DEFERRED = 64
# Preempting is a last resort: if more than a few are needed in one step, the rest waits for the next.
MAX_PREEMPTIONS_PER_STEP = 8
# What a guest gets of each step before all others, as a divisor of the step's tokens.
GUEST_SHARE = 8
LOWER_LANES = (Lane.STANDARD, Lane.BATCH)


class Stopped(Enum):
    """Why no more of a lane was admitted."""

    NOBODY_WAITS = 0
    NOT_BY_ROOM = 1  # the step is full, or they wait for a prefix
    BY_FORECAST = 2  # the next one fits now, but its lane would outgrow the pool
    BY_ROOM_NOW = 3  # the next one does not fit, so nobody of a lower lane takes what it waits for


class Scheduler(RunningSet):
    """schedule() → plan → (executor) → commit(plan, result)."""

    def __init__(self, limits: SchedulerLimits, blocks: KVBlocks, stats: EngineStats) -> None:
        super().__init__(limits, blocks, stats)
        self.drain_rate = DrainRate()
        self.prompt_backlog = [0 for _ in LANES]  # tokens of running sequences' prompts that no step was given yet
        self._gate = BatchGate(limits)
        self._step_id = 0
        self._guest: Sequence | None = None  # the latest one
        self._deferred_members: set[int] = set()  # of a batch being formed: ids
        self._preemptions_left = 0  # in this step

    def wait_s(self, sequence: Sequence, now_s: float) -> float:
        """How long a sequence that is submitted now will wait for its admission, as far as the rate of late tells."""
        if sequence.deadline_s is None or not self.drain_rate.is_queueing(sequence.lane):
            return 0.0
        ahead = self.waiting.num_due_before(sequence.lane, sequence.deadline_s)
        everyone = sum(self.waiting.count[: sequence.lane + 1])
        if not everyone:
            return 0.0
        return self.drain_rate.retry_delay_s(sequence.lane, self.waiting.count, now_s) * ahead / everyone

    def wakes_s(self) -> float | None:
        """When time alone changes what schedule() would do; None: never."""
        if not len(self.waiting):
            return None
        times = []
        if self._gate.is_open_always:
            if not self._guest_blocked and self._current_guest() is None:
                since_s = [self.waiting.neglected_since_s(lane) for lane in LOWER_LANES]
                times += [time_s + self.limits.aging_s for time_s in since_s if time_s is not None]
        elif not self.running:
            opens_s = self._gate.opens_s(self.waiting)
            if opens_s is not None:
                times.append(opens_s)
        hopeless_s = self.deadlines.next_s()
        return min([*times, *([] if hopeless_s is None else [hopeless_s])], default=None)

    def schedule(self, now_s: float) -> StepPlan | None:
        """The next step, or None if there is nothing to compute now."""
        self._preemptions_left = MAX_PREEMPTIONS_PER_STEP
        if self._guest is not None and self._current_guest() is None:
            self._guest = None
            self._something_changed()  # what it held can be had now
        self._gate.open(self.waiting, busy=bool(self.running or self._retiring), now_s=now_s)
        budget = StepBudget(self.limits, self.cost)
        steps: list[SequenceStep] = []
        self._preempt_for_waiting(now_s)
        preemptions_before = self.stats.preemptions
        chunks = self._schedule_decodes(steps, budget)
        may_admit = self.stats.preemptions == preemptions_before
        budget.decodes_are_in()
        self._schedule_prompts(steps, chunks, budget, now_s, may_admit=may_admit)
        self.drain_rate.step_over(self.waiting.count, now_s)
        if not steps and self._gate.holds_decodes_until_prompts_are_done:
            # The batch is complete after all. Who waits for a prefix that a member computes would wait for ever.
            if any(sequence.num_unscheduled == 1 for sequence in self.running):
                self._gate.close()
            self._schedule_decodes(steps, budget)
        if not steps:
            return None
        padding = None
        if not self._gate.is_open_always:
            contexts = [step.num_computed + 1 for step in steps if step.num_new == 1]
            padding = self._gate.padding(budget.tokens_left, contexts)
        self._step_id += 1
        ended, self._ended = self._ended, []
        starts, self._starts = list(self._starts.values()), {}
        plan = StepPlan(self._step_id, steps, starts, ended, padding)
        self._in_flight.append(plan)
        self._loads[plan.step_id] = budget.load(plan.num_padding)
        return plan

    def repeatable(self, plan: StepPlan) -> int:
        """How many times over the plan just scheduled would be scheduled again, if nothing arrives, nothing ends before
        its max_tokens and no time of wakes_s() comes; 1 if it would not."""
        budget_allows = (
            not plan.starts
            and len(plan.steps) == len(self.running)
            and not self._retiring
            and (not len(self.waiting) or self._blocked or len(self.running) >= self.limits.max_running_requests)
            and plan.num_decodes == len(plan.steps)
        )
        if not budget_allows or not self._gate.is_open_always:
            return 1
        size = self.blocks.block_size
        # Sequences that a plan before this one brings to their end would leave in between.
        most = 1 + min([s.last_to_compute - s.num_scheduled for s in self.running])
        guest = self._guest
        if guest is not None and guest.block_table:
            # When it has got what it was promised, others may take its place.
            most = min(most, guest.promised_len - guest.num_scheduled + 1)
        if most <= 1:
            return 1
        spare = max(0, self.blocks.num_available - self.admission.most_reserved(self.running))
        held = sum([len(s.block_table) for s in self.running])
        while most > 1 and sum([-(-(s.num_scheduled + most - 1) // size) for s in self.running]) - held > spare:
            most //= 2
        return max(1, most)

    def repeat(self, plan: StepPlan, repeats: int) -> StepPlan:
        """Makes the plan just scheduled count `repeats` times, at most what repeatable() said."""
        assert self._in_flight[-1] is plan, "only the latest plan can be repeated"
        steps, more = [], repeats - 1
        for step in plan.steps:
            sequence = self._sequences[step.sequence_id]
            sequence.num_scheduled += more
            sequence.num_pending += more
            missing = self.blocks.num_missing(sequence, sequence.num_scheduled)
            if missing:
                step = step._replace(new_blocks=[*step.new_blocks, *self.blocks.grow(sequence, missing)])
            steps.append(step)
        repeated = StepPlan(plan.step_id, steps, [], plan.ended, repeats=repeats)
        self._in_flight[-1] = repeated
        return repeated

    def _schedule_decodes(self, steps: list[SequenceStep], budget: StepBudget) -> list[Sequence]:
        """Gives every sequence that is one token behind its token; returns those that are further behind."""
        chunks: list[Sequence] = []
        step_id, block_size = self._step_id + 1, self.blocks.block_size
        tokens_left, lower_left, kv_tokens = budget.tokens_left, budget.lower_left, 0
        order = self.running.copy()
        guest = self._current_guest()
        if guest is not None:
            order.remove(guest)
            order.insert(0, guest)
        hold = self._gate.holds_decodes_until_prompts_are_done and (
            self._gate.is_forming or any(sequence.num_unscheduled > 1 for sequence in order)
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
                if not sequence.block_table or not self._can_grow(sequence):
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
        guest = self._find_guest(chunks, now_s)
        guest_waits = self._guest_blocked
        if guest is not None:
            share = max(1, self.limits.max_step_tokens // GUEST_SHARE)
            if may_admit and guest in self.waiting:
                guest_waits = not self._start_guest(guest, now_s)
            if guest.block_table:
                self._chunk(guest, min(most, share), steps, budget)
                chunks = [sequence for sequence in chunks if sequence is not guest]
        if guest_waits:
            # Nobody overtakes it; the interactive lane is held up only if it alone is in the guest's way.
            may_admit = may_admit and any(sequence.lane is not Lane.INTERACTIVE for sequence in self.running)
        may_admit = may_admit and not self._blocked and len(self.waiting) > 0
        # Whether everybody who waits was found not to fit, and nothing is on its way that could change that.
        blocked = may_admit and not guest_waits and self._gate.is_open_always
        for lane in LANES:
            for sequence in chunks:
                if sequence.lane is lane and sequence.block_table:
                    self._chunk(sequence, most, steps, budget)
            if may_admit:
                stopped = self._admit(lane, most, steps, budget, now_s)
                blocked &= stopped is not Stopped.NOT_BY_ROOM
                may_admit = stopped is not Stopped.BY_ROOM_NOW and not guest_waits
        if blocked and len(self.waiting):
            self._blocked = not self._retiring and self._preemptions_left == MAX_PREEMPTIONS_PER_STEP
        self._count_backlog(budget, has_prompts=bool(chunks or self._starts))

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
        sequence.last_step = self._step_id + 1

    def _admit(self, lane: Lane, most: int, steps: list[SequenceStep], budget: StepBudget, now_s: float) -> "Stopped":
        """Moves a lane's waiting sequences into the running set while there is room."""
        deferred = 0
        stopped = Stopped.NOBODY_WAITS
        while True:
            if not budget.room(lane) or deferred == MAX_DEFERRED:
                stopped = Stopped.NOT_BY_ROOM
                break
            sequence = self._next(lane)
            if sequence is None:
                break
            if self._prefixes.covers_next(sequence, self._match(sequence)):
                self._defer(sequence)
                deferred += 1
                continue
            if not self._fits(sequence):
                # Where the pool has room for it now, but not for what all of its lane will need, lower lanes may use
                # what is free: they give it back when it is wanted.
                foreseen = self.admission.has_room_now(sequence, self.running) and self._gate.is_open_always
                stopped = Stopped.BY_FORECAST if foreseen else Stopped.BY_ROOM_NOW
                self._gate.close()
                break
            self._start(sequence, now_s)
            self._chunk(sequence, most, steps, budget)
        self._restore()
        return Stopped.NOT_BY_ROOM if deferred else stopped

    def _next(self, lane: Lane) -> Sequence | None:
        """Who is to be admitted next, apart from those deferred."""
        if self._gate.is_open_always:
            return self.waiting.next(lane)
        members = self._gate.expected(lane, self.waiting)
        return next((s for s in members if s.sequence_id not in self._deferred_members), None)

    def _defer(self, sequence: Sequence) -> None:
        if self._gate.is_open_always:
            self.waiting.defer(sequence)
        else:
            self._deferred_members.add(sequence.sequence_id)

    def _restore(self) -> None:
        self.waiting.restore()
        self._deferred_members.clear()

    def _fits(self, sequence: Sequence) -> bool:
        admission, running = self.admission, self.running
        return (
            admission.has_slot(sequence, running)
            and admission.has_time(sequence, running)
            and admission.has_blocks(sequence, running)
        )

    def _start(self, sequence: Sequence, now_s: float) -> None:
        """Takes a sequence into the running set."""
        self.waiting.remove(sequence)
        self.waiting.admitted_s[sequence.lane] = now_s
        self.blocks.admit(sequence)
        insort(self.running, sequence, key=attrgetter("rank"))
        self.stats.admitted(sequence, now_s)
        account = sequence.account
        account.running += 1
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(sequence.num_computed, sequence.prompt_len)
            sequence.admitted_s = now_s
            account.cached_tokens += sequence.num_computed
            account.input_tokens += len(sequence.token_ids) - sequence.num_computed
            self._admitted.append(sequence.sequence_id)
            self.drain_rate.admitted(sequence.lane, now_s)
        if sequence.wants_prompt_logprobs:
            sequence.prompt_logprobs = []
        self._gate.joined(sequence)
        self._prefixes.announce(sequence)
        self._starts[sequence.sequence_id] = SequenceStart(
            sequence.sequence_id,
            list(sequence.token_ids),
            sequence.prompt_len,
            list(sequence.block_table),
            sequence.sampling,
        )

    def _current_guest(self) -> Sequence | None:
        guest = self._guest
        return guest if guest is not None and guest.block_table and is_guest(guest) else None

    def _find_guest(self, chunks: list[Sequence], now_s: float) -> Sequence | None:
        """The sequence whose prompt goes before all others in this step because of its age."""
        if not self._gate.is_open_always:
            return None
        guest = self._current_guest()
        if guest is not None:
            return guest if guest in chunks else None
        aged_s = now_s - self.limits.aging_s
        for sequence in chunks:
            if sequence.lane is not Lane.INTERACTIVE and (sequence.admitted_s or 0.0) <= aged_s:
                # What it has is all that can be promised without taking from others.
                self._guest, sequence.promised_len = sequence, len(sequence.token_ids)
                return sequence
        for lane in () if self._guest_blocked else LOWER_LANES:
            since_s = self.waiting.neglected_since_s(lane)
            if since_s is None or since_s > aged_s:
                continue
            following = self.waiting.next(lane)
            if following and not self._prefixes.covers_next(following, self._match(following)):
                return following
            # Otherwise somebody who runs is computing for it.
        return None

    def _start_guest(self, guest: Sequence, now_s: float) -> bool:
        """Lets the guest in, if it fits."""
        guest.promised_len = self.admission.guest_promise(guest)
        if not self._fits(guest):
            guest.promised_len = 0
            self._guest_blocked = not self._retiring
            return False
        self._start(guest, now_s)
        self._guest = guest
        return True

    def _can_grow(self, sequence: Sequence) -> bool:
        """Whether a running sequence can have one more block; sees to it that it can, if somebody ranks lower."""
        while True:
            reserve = self.admission.reserve_for(sequence, self.running)
            if self.blocks.can_grow(1, reserve):
                return True
            if self._retiring or not self._preemptions_left:
                return False  # blocks are on their way
            victim = cheapest_victim(self.running, sequence.rank, lower_lanes_only=False, spared=self._is_settled)
            if victim is None:
                return False  # it waits, with what it has, until somebody ends
            self._preempt(victim)

    def _is_settled(self, sequence: Sequence) -> bool:
        """Whether it has a part in the step that is being planned, or has just been let in."""
        return sequence.last_step > self._step_id or sequence.sequence_id in self._starts

    def _preempt_for_waiting(self, now_s: float) -> None:
        """Lets in what waits in a higher lane and does not fit because of lower ones. Comes before anything else of a
        step is settled, since whoever is preempted has no part in it."""
        if self._blocked or not self._gate.is_open_always or not len(self.waiting):
            return
        for lane in (Lane.INTERACTIVE, Lane.STANDARD):
            for _ in range(MAX_PREEMPTIONS_PER_STEP):
                sequence = self.waiting.next(lane)
                if sequence is None:
                    break  # on to the next lane
                if self._prefixes.covers_next(sequence, self._match(sequence)):
                    self.waiting.defer(sequence)
                    continue
                if not self.running or self.running[-1].lane <= lane or self._fits(sequence):
                    break  # there is nobody to preempt, or it is let in with all others
                self._make_room(sequence)
                if not self._fits(sequence):
                    break
                self._start(sequence, now_s)
        self.waiting.restore()

    def _make_room(self, sequence: Sequence) -> None:
        """Preempts sequences of lower lanes for one that is to be admitted, if that is enough."""
        lower = [s for s in self.running if s.lane > sequence.lane and not is_guest(s) and not self._is_settled(s)]
        if not lower or self._retiring or not self.admission.would_fit_without(lower, sequence, self.running):
            return
        while self._preemptions_left and not self._retiring and not self._fits(sequence):
            victim = cheapest_victim(self.running, sequence.rank, lower_lanes_only=True, spared=self._is_settled)
            if victim is None:
                return
            self._preempt(victim)

    def _preempt(self, sequence: Sequence) -> None:
        """Takes a running sequence's blocks and puts it back into the queue."""
        self._preemptions_left -= 1
        self.stats.preempted(sequence.num_scheduled)
        self._leave(sequence)
        sequence.generation += 1
        sequence.promised_len = 0
        self.waiting.put_back(sequence)

    def refuse_hopeless(self, now_s: float) -> list[Sequence]:
        """Takes out what waits and cannot meet its deadline any more."""
        refused = []
        while (sequence := self.deadlines.hopeless(now_s)) is not None:
            self._remove(sequence)
            self.stats.expired(sequence)
            refused.append(sequence)
        return refused
