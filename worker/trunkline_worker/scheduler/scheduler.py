"""Decides, step by step, which tokens of which sequences are computed. Pure: time is an argument, and nothing here
depends on a device or a socket.

A step is filled in this order, under one token budget: sequences with one token to compute, by rank; runs of tokens
that are known to follow these (runs.py); then, lane by lane, chunks of prompts that have been begun, and waiting
sequences. Chunks are cut so that the step stays under its target time (step_cost.py). waiting.py and fair_share.py give
the order of waiting sequences; admission.py decides whether one fits; the batching policy (batching.py) decides when
sequences may join at all.

When the pool runs dry a sequence of lower rank is preempted: its blocks are released (they stay reusable until taken)
and it computes again later. No sequence is admitted in a step that preempted for growth. The highest rank always
advances, and a sequence never outgrows an empty pool, because max_tokens is bounded by the pool at submission.
"""

from trunkline_worker.cache.block_copies import BlockCopies
from trunkline_worker.cache.blocks import KVBlocks
from trunkline_worker.cache.sequence import AwaitedResource, Sequence
from trunkline_worker.scheduler.admission import Admission
from trunkline_worker.scheduler.aging import Aging, Overdue
from trunkline_worker.scheduler.batching import batching_policy
from trunkline_worker.scheduler.deadlines import Deadlines, DrainRate
from trunkline_worker.scheduler.lane_sharing import LaneSharing
from trunkline_worker.scheduler.limits import SchedulerLimits
from trunkline_worker.scheduler.masks import Masker
from trunkline_worker.scheduler.preemption import Preemption
from trunkline_worker.scheduler.prompts import PromptScheduling
from trunkline_worker.scheduler.running_set import Evictions, RunningSet, StepsInFlight
from trunkline_worker.scheduler.runs import RunScheduling
from trunkline_worker.scheduler.sequence_table import SequenceTable, StepOutputs
from trunkline_worker.scheduler.stats import EngineStats
from trunkline_worker.scheduler.step_budget import StepBudget
from trunkline_worker.scheduler.step_cost import StepCost, StepLoad
from trunkline_worker.scheduler.waiting import Waiting
from trunkline_worker.step.lanes import Lane
from trunkline_worker.step.plan import NO_MASKS, Masks, SequenceStep, StepPlan, StepResult


class Scheduler:
    """schedule() → plan → (executor) → commit(plan, result)."""

    def __init__(self, limits: SchedulerLimits, blocks: KVBlocks, stats: EngineStats) -> None:
        self.limits = limits
        self.blocks = blocks
        self.copies = BlockCopies(blocks)
        self.stats = stats
        self.masker: Masker | None = None  # None: nothing is constrained
        self.waiting = waiting = Waiting(blocks.block_size)
        self.cost = cost = StepCost()
        self.admission = admission = Admission(limits, blocks, cost)
        self.deadlines = Deadlines(waiting, blocks, cost)
        self.drain_rate = drain_rate = DrainRate()
        self._batching = batching = batching_policy(limits, waiting)
        self._in_flight = in_flight = StepsInFlight()
        self._running = running = RunningSet(
            blocks=blocks, waiting=waiting, batching=batching, in_flight=in_flight, drain_rate=drain_rate, stats=stats
        )
        self.faults = running.faults
        self._table = SequenceTable(
            running=running,
            waiting=waiting,
            blocks=blocks,
            in_flight=in_flight,
            deadlines=self.deadlines,
            cost=cost,
            output_lengths=admission.output_lengths,
            stats=stats,
        )
        self._overdue = overdue = Overdue(waiting, limits.itl_target_s)
        self._evictions = evictions = Evictions(running, waiting, stats)
        self._sharing = sharing = LaneSharing(
            limits=limits,
            running=running,
            waiting=waiting,
            blocks=blocks,
            cost=cost,
            admission=admission,
            overdue=overdue,
            evictions=evictions,
        )
        self._preemption = Preemption(
            running=running,
            waiting=waiting,
            blocks=blocks,
            admission=admission,
            overdue=overdue,
            evictions=evictions,
            sharing=sharing,
        )
        self._aging = aging = Aging(limits, running, waiting, admission)
        self.runs = runs = RunScheduling(
            running=running,
            waiting=waiting,
            blocks=blocks,
            admission=admission,
            most_samples=admission.places(Lane.INTERACTIVE),
        )
        self._prompts = PromptScheduling(
            limits=limits,
            running=running,
            waiting=waiting,
            batching=batching,
            in_flight=in_flight,
            admission=admission,
            overdue=overdue,
            evictions=evictions,
            sharing=sharing,
            aging=aging,
            runs=runs,
        )
        self._planned_s = float("-inf")  # when a step was planned last
        self._looked_s = float("-inf")  # when waiting sequences were looked at last

    # Sequences

    @property
    def running(self) -> list[Sequence]:
        """Running sequences, by rank. Read only."""
        return self._running.members

    @property
    def sequences(self) -> dict[int, Sequence]:
        """Running and waiting sequences, by id. Read only."""
        return self._table.by_id

    @property
    def has_work(self) -> bool:
        """Whether any sequence runs or waits, or a block is being copied."""
        return bool(self._table.by_id) or self.copies.has_any

    def submit(self, sequence: Sequence) -> None:
        """Puts a sequence into the queue. Its id must be new, its sampling bounded by the pool."""
        self._table.submit(sequence)

    def abort(self, sequence_id: int, now_s: float) -> bool:
        """Drops a sequence, running or waiting; its blocks are free at the next step boundary. Returns False if it has
        ended already."""
        return self._table.abort(sequence_id, now_s)

    def finish(self, sequence_id: int, now_s: float) -> bool:
        """Ends a sequence for a reason that the engine cannot see, a stop string. Returns False if it has ended
        already."""
        return self._table.finish(sequence_id, now_s)

    def await_resource(self, sequence_id: int, resource: AwaitedResource, now_s: float) -> None:
        """A waiting sequence cannot be admitted before ready(resource): see awaiting.py. A new one may name what it
        awaits when it is submitted."""
        self.waiting.hold(self.sequences[sequence_id], resource, now_s)
        self._running.note_change()  # the sequences behind it may fit

    def ready(self, resource: AwaitedResource, now_s: float) -> None:
        """A resource is there: sequences that await nothing else can be admitted."""
        self.waiting.release(resource, now_s)
        self._running.note_change()

    def failed(self, resource: AwaitedResource, now_s: float) -> list[Sequence]:
        """A resource will never be there. Removes and returns the sequences that await it."""
        broken_off = self.waiting.awaiting.of(resource)
        for sequence in broken_off:
            self.abort(sequence.sequence_id, now_s)
        return broken_off

    def refuse_hopeless(self, now_s: float) -> list[Sequence]:
        """Removes and returns waiting sequences that cannot meet their deadlines any more."""
        refused = []
        while (sequence := self.deadlines.hopeless(now_s)) is not None:
            self._table.expire(sequence)
            refused.append(sequence)
        return refused

    def take_admitted(self) -> list[tuple[int, float, float]]:
        """Ids of the sequences admitted for the first time since the last call, when each was, and how long it awaited
        resources before."""
        return self._running.take_admitted()

    def take_preempted(self) -> list[int]:
        """Ids of the sequences preempted since the last call, each as often as it was."""
        return self._evictions.take_preempted()

    # Steps

    @property
    def step_id(self) -> int:
        """Of the latest plan."""
        return self._in_flight.latest_id

    @property
    def loads(self) -> dict[int, StepLoad]:
        """What the plans in flight cost in terms of the cost model, by step_id."""
        return self._in_flight.loads

    @property
    def last_commit_s(self) -> float:
        """When the latest committed step was done; NaN before the first."""
        return self._table.last_commit.done_s

    @property
    def last_load(self) -> StepLoad:
        """What the latest committed step should have cost."""
        return self._table.last_load

    @property
    def running_kv_tokens(self) -> int:
        """Context lengths of the running sequences, summed, as of the latest plan."""
        return self._running.kv_tokens

    @property
    def prompt_backlog(self) -> list[int]:
        """Tokens of running prompts that no step was given yet, by lane, as of the latest plan."""
        return self._prompts.backlog

    @property
    def is_blocked(self) -> bool:
        """Whether no waiting sequence fits, and nothing has changed since that was found out."""
        return self._running.is_blocked

    def expected_s(self, plan: StepPlan) -> float:
        """How long a plan in flight should take on the device; 0 while that is not known."""
        return self.cost.time_s(self.loads[plan.step_id]) if self.cost.is_known else 0.0

    def commit(self, plan: StepPlan, result: StepResult, now_s: float) -> StepOutputs:
        """Takes in the result of the oldest plan. Entries of sequences that have ended or were preempted are dropped.

        now_s: when the step was done
        """
        if result.copies:
            self.copies.end(result.copies)
            self._running.note_change()
        return self._table.commit(plan, result, now_s) if plan.steps else self._table.commit_copies(plan)

    def wakes_s(self) -> float | None:
        """When the passing of time alone changes what schedule() would do; None: it does not."""
        if not self.waiting.num_ready:
            return self.deadlines.next_s()
        times_s = [self.deadlines.next_s(), self._overdue.next_s(self._planned_s), self._changes_s()]
        if self._batching.admits_while_running:
            times_s.append(self._aging.next_s())
        if not self.running:
            times_s.append(self._batching.opens_s())
        return min([time_s for time_s in times_s if time_s is not None], default=None)

    def _changes_s(self) -> float | None:
        """When tenants' shares are computed again."""
        return self._sharing.changes_s(self._looked_s) if self._batching.admits_while_running else None

    def schedule(self, now_s: float) -> StepPlan | None:
        """The next step; None if there is nothing to compute now."""
        running, waiting = self._running, self.waiting
        self._aging.end_if_over()
        if waiting.num_ready:
            for time_s in (self._overdue.next_s(self._planned_s), self._changes_s()):
                if time_s is not None and now_s >= time_s:
                    running.note_change()
        if not running.is_blocked:
            self._looked_s = now_s
        self._planned_s = now_s
        self._batching.begin_step(busy=bool(running.members or running.is_retiring), now_s=now_s)
        budget = StepBudget(self.limits, self.cost)
        steps: list[SequenceStep] = []
        self._begin_preemption(now_s)
        preemptions_before = self.stats.preemptions
        chunks = self._schedule_decodes(steps, budget)
        if self.runs.proposer is not None:
            self._add_runs(steps, budget)
        may_admit = self.stats.preemptions == preemptions_before
        budget.decodes_are_in()
        self._prompts.fill(steps, chunks, budget, now_s, may_admit=may_admit)
        self.drain_rate.step_over(waiting.new_and_ready, now_s)
        if not steps and self._batching.releases_decodes(running.members):
            self._schedule_decodes(steps, budget)
        if not steps and (self._in_flight or not self.copies.has_any):
            return None
        padding = self._batching.padding(budget.tokens_left, steps) if steps else None
        plan = StepPlan(self.step_id + 1, steps, running.take_starts(), running.take_ended(), padding=padding)
        if self.runs.proposer is not None:
            plan.runs = self.runs.take_planned()
        if self.masker is not None:
            plan.masked = self._masked(plan, self.masker)
        if self.copies.has_any:
            plan.copies = self.copies.take_planned()
        self._in_flight.add(plan, budget.load(plan.num_padding))
        return plan

    def _masked(self, plan: StepPlan, masker: Masker) -> list[int]:
        """The entries of a plan that are sampled under a mask."""
        runs, sequences = plan.runs, self.sequences
        sampled = [i for i, s in enumerate(plan.steps) if s.samples and (i not in runs or runs[i].num_samples)]
        return [i for i in sampled if self._is_constrained(sequences[plan.steps[i].sequence_id], masker)]

    def _is_constrained(self, sequence: Sequence, masker: Masker) -> bool:
        try:
            return masker.constrains(sequence)
        except Exception as error:  # one sequence's error must not end the engine
            self.faults.append((sequence.sequence_id, error))
            return True

    def masks(self, plan: StepPlan) -> Masks:
        """The masks of a plan in flight, once every step before it is committed and before another one is planned. A
        sequence whose mask is not ready sits out: a later step computes its last token again."""
        masker = self.masker
        if masker is None:
            return NO_MASKS
        masks = {}
        for index in plan.masked:
            step = plan.steps[index]
            sequence = self.sequences.get(step.sequence_id)
            if sequence is None or sequence.generation != step.generation:
                continue
            run = plan.runs.get(index)
            try:
                found = masker.masks(sequence, run)
                if found is not None and len(found) != (1 if run is None else run.num_samples):
                    raise ValueError(f"{len(found)} masks are not as many as the samples")
            except Exception as error:  # one sequence's error must not end the engine
                self.faults.append((sequence.sequence_id, error))
                found = None
            if found is None:
                sequence.fall_back(len(sequence.token_ids) - 1)
            else:
                masks[index] = found
        return masks

    def _begin_preemption(self, now_s: float) -> None:
        """Makes room for waiting sequences before anything else of the step is settled."""
        sharing = self._sharing
        self._evictions.begin_step()
        sharing.begin_step(now_s)
        if not self._batching.admits_while_running:
            return
        for lane in sharing.contended():
            sharing.end_stretching(lane)
        if not self._running.is_blocked and self.waiting.num_ready:
            self._preemption.make_room(now_s)

    def _schedule_decodes(self, steps: list[SequenceStep], budget: StepBudget) -> list[Sequence]:
        """Gives every sequence that is one token behind its token; returns those that are further behind."""
        chunks: list[Sequence] = []
        step_id, block_size = self.step_id + 1, self.blocks.block_size
        tokens_left, lower_left, kv_tokens = budget.tokens_left, budget.lower_left, 0
        order = self._running.members.copy()
        if self.blocks.num_available < 2 * len(order) and self._sharing.contended():
            order = self._sharing.order(order)
        aged = self._aging.current()
        if aged is not None:
            order.remove(aged)
            order.insert(0, aged)
        order = self.runs.ready(order)
        hold = self._batching.holds_decodes(order)
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

    def _add_runs(self, steps: list[SequenceStep], budget: StepBudget) -> None:
        """Adds runs to the decodes of a step."""
        for index, step in enumerate(steps):
            sequence = self.sequences[step.sequence_id]
            if sequence.num_pending == 1:  # its own sample: all tokens before it are known
                self.runs.extend(sequence, index, steps, budget)

    def check_integrity(self) -> None:
        """Asserts that blocks, queues and counters agree. Cheap enough for every step of a test."""
        self._running.check_integrity()
        self._table.check_integrity()
        self.waiting.check_integrity()
        self._aging.check_integrity()
