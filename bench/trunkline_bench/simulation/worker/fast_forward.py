"""An engine that computes many equal steps at once, for simulations.

Between two events (an arrival, an end, a full block pool) a decoding batch is scheduled in the same way in each step,
so one plan can stand for many steps. A repetition has exactly the effect of a step of its own; only the host does less.
"""

from collections.abc import Callable

from trunkline_bench.simulation.worker.simulated_executor import RepeatedPlan, RepeatedResult, SimulatedExecutor
from trunkline_worker.cache.sequence import StepMark
from trunkline_worker.engine.engine import Engine, ModelLimits
from trunkline_worker.scheduler.scheduler import Scheduler
from trunkline_worker.scheduler.sequence_table import StepOutputs
from trunkline_worker.scheduler.stats import StepCounts
from trunkline_worker.scheduler.step_cost import StepLoad
from trunkline_worker.step.lanes import LANES
from trunkline_worker.step.plan import SequenceStep, StepPlan


class FastForwardScheduler(Scheduler):
    """most_repeats() asks, repeat() does, and commit_repeats() takes in the results."""

    def most_repeats(self, plan: StepPlan) -> int:
        """How many times in a row the plan just scheduled would be scheduled, if no request arrives, no sequence ends
        before its max_tokens and no time of wakes_s() comes; at least 1."""
        running, blocks = self.running, self.blocks
        none_joins = (
            not len(self.waiting)
            or self.is_blocked
            or (
                len(running) >= self.limits.max_running_requests
                and not any(lane.is_contended for lane in self.waiting.lanes)
            )
        )
        if self.masker is not None or self.runs.proposer is not None or self.copies.has_any:
            return 1
        all_decode = not plan.starts and len(plan.steps) == len(running) and plan.num_decodes == len(plan.steps)
        if not (all_decode and none_joins and self._batching.admits_while_running) or self._running.is_retiring:
            return 1
        # Sequences that end with an earlier plan would leave in between.
        most = 1 + min([s.last_to_compute - s.num_scheduled for s in running])
        aged = self._aging.latest
        if aged is not None and aged.block_table:  # others may take its place once it has what it was promised
            most = min(most, aged.promised_len - aged.num_scheduled + 1)
        if most <= 1:
            return 1
        size = blocks.block_size
        spare = max(0, blocks.num_available - self._most_reserved())
        held = sum([len(s.block_table) for s in running])
        while most > 1 and sum([-(-(s.num_scheduled + most - 1) // size) for s in running]) - held > spare:
            most //= 2
        return max(1, most)

    def _most_reserved(self) -> int:
        """The largest Admission.reserve_for() of any running sequence."""
        if not self.limits.interactive_reserve and not any([sequence.promised_len for sequence in self.running]):
            return 0
        return max([self.admission.reserve_for(sequence, self.running) for sequence in self.running])

    def repeat(self, plan: StepPlan, repeats: int) -> RepeatedPlan:
        """Makes the plan just scheduled count `repeats` times, at most as often as most_repeats() returned."""
        steps, more = [], repeats - 1
        for step in plan.steps:
            sequence = self.sequences[step.sequence_id]
            sequence.num_scheduled += more
            sequence.num_pending += more
            missing = self.blocks.num_missing(sequence, sequence.num_scheduled)
            if missing:
                step = step._replace(new_blocks=[*step.new_blocks, *self.blocks.grow(sequence, missing)])
            steps.append(step)
        repeated = RepeatedPlan(plan.step_id, steps, [], plan.ended, repeats=repeats)
        self._in_flight.plans[-1] = repeated
        return repeated

    def commit_repeats(self, plan: RepeatedPlan, result: RepeatedResult) -> tuple[StepPlan, StepOutputs]:
        """Takes in all repetitions of the oldest plan but the last one, which is left as a plan of its own. Returns
        that plan and what the others produced. No sequence ends in them: see most_repeats()."""
        count, size = len(result.times_s), len(plan.steps)
        in_flight, sequences = self._in_flight, self.sequences
        rest, outputs = StepPlan(plan.step_id, []), StepOutputs()
        first = in_flight.loads[plan.step_id]

        def load_after(repeats: int) -> StepLoad:
            kv_tokens = first.decode_kv_tokens + repeats * size
            return StepLoad(first.num_tokens, kv_tokens, 0.0, first.num_sequences)

        in_flight.plans[0], in_flight.loads[plan.step_id] = rest, load_after(count)
        self._running.kv_tokens += count * size
        self._count_repeats(plan, [load_after(repeats) for repeats in range(count)], result)
        for index, step in enumerate(plan.steps):
            sequence = sequences[step.sequence_id]
            sequence.token_ids += result.repeated_token_ids[index]
            outputs.handles += [step.sequence_id] * count
            outputs.token_ids += result.repeated_token_ids[index]
            sequence.num_pending -= count
            computed = sequence.num_computed + count
            if computed // self.blocks.block_size > sequence.num_published:
                self._running.publish(sequence, computed)
            else:
                sequence.num_computed = computed
            sequence.account.output_tokens += count
            rest.steps.append(
                SequenceStep(step.sequence_id, step.generation, step.num_computed + count, 1, (), samples=True)
            )
        return rest, outputs

    def _count_repeats(self, plan: RepeatedPlan, loads: list[StepLoad], result: RepeatedResult) -> None:
        """Counts repetitions in the cost model and the statistics, as SequenceTable.commit() counts steps."""
        lanes, before, first_s = self.stats.lanes, self._table.last_commit, result.done_s[0]
        device_s = sum(result.times_s) / len(plan.steps)
        mark = StepMark(result.done_s[-1], before.device_s_per_token + device_s)
        for load, time_s in zip(loads, result.times_s, strict=True):
            if self.cost.is_fit_due:  # as the engine does while the next step computes
                self.cost.fit()
            self.cost.observe(load, time_s)
        regular = [0 for _ in LANES]  # tokens that were sampled one step after the token before
        for step in plan.steps:
            sequence = self.sequences[step.sequence_id]
            lane = lanes[sequence.lane]
            if sequence.last_token is before:
                regular[sequence.lane] += 1
            elif sequence.last_token is not None:
                lane.itl.add(first_s - sequence.last_token.done_s)
            sequence.last_token = mark
            lane.output_tokens += len(loads)
        later = [0 for _ in LANES]
        for sequence in self.running:
            later[sequence.account.lane] += 1
        before_s = before.done_s
        for done_s in result.done_s:
            for counts, number in zip(lanes, regular, strict=True):
                if number:
                    counts.itl.add(done_s - before_s, number)
            before_s, regular = done_s, later
        self._table.last_commit = mark


class FastForwardEngine(Engine):
    """An engine whose plans may stand for many equal steps."""

    scheduler: FastForwardScheduler
    executor: SimulatedExecutor

    def __init__(
        self,
        scheduler: FastForwardScheduler,
        executor: SimulatedExecutor,
        limits: ModelLimits,
        clock_s: Callable[[], float],
    ) -> None:
        super().__init__(scheduler, executor, limits, clock_s)
        self.next_arrival_s = float("inf")  # no request arrives before it
        self.repeats_done_s: list[float] = []  # when the repetitions that were committed last were done

    def _advance(self, now_s: float) -> StepOutputs | None:
        self.repeats_done_s = []
        if self._in_flight and isinstance(self._in_flight[0], RepeatedPlan):
            # Time has passed: requests that have arrived by now are taken in before the next plan.
            return self._commit_repeats(self._in_flight[0])
        return super()._advance(now_s)

    def _schedule(self, now_s: float) -> StepPlan | None:
        plan = super()._schedule(now_s)
        most = 1 if plan is None else self.scheduler.most_repeats(plan)
        if plan is None or most <= 1:
            return plan
        wakes_s = self.scheduler.wakes_s()
        until_s = self.next_arrival_s if wakes_s is None else min(self.next_arrival_s, wakes_s)
        repeats = self.executor.repeats(plan, most, until_s)
        return self.scheduler.repeat(plan, repeats) if repeats > 1 else plan

    def _commit_oldest(self) -> StepOutputs:
        oldest = self._in_flight[0]
        if not isinstance(oldest, RepeatedPlan):
            return super()._commit_oldest()
        earlier = self._commit_repeats(oldest)  # just launched, by an executor that does not run ahead
        outputs = super()._commit_oldest()
        outputs.handles[:0], outputs.token_ids[:0] = earlier.handles, earlier.token_ids
        return outputs

    def _commit_repeats(self, plan: RepeatedPlan) -> StepOutputs:
        """Collects and commits all but the last repetition of the oldest plan."""
        result = self.executor.collect()
        assert isinstance(result, RepeatedResult)
        self.repeats_done_s = result.done_s
        self._in_flight[0], outputs = self.scheduler.commit_repeats(plan, result)
        self._time_next_plan(self._clock_s())
        num_steps, host_s = len(plan.steps), self._host_s[0]
        for time_s, done_s in zip(result.times_s, result.done_s, strict=True):
            counts = StepCounts(decode_tokens=num_steps, sequences=num_steps, host_time_s=host_s, device_time_s=time_s)
            self.scheduler.stats.step(counts, done_s)
        return outputs
