"""Plans that stand for many equal steps: simulations use them where only the passing of time would change the plan.

A repetition has exactly the effect of a step of its own; only the host does less for it. Workers that serve never
repeat a plan. The module is part of the scheduler, not of the simulator, because a repetition advances the counters,
blocks and plans in flight that only schedule() and commit() may change.
"""

from dataclasses import dataclass

from trunkline_worker.cache.blocks import KVBlocks
from trunkline_worker.scheduler.admission import Admission
from trunkline_worker.scheduler.aging import Aging
from trunkline_worker.scheduler.batching.policy import BatchingPolicy
from trunkline_worker.scheduler.pace.limits import SchedulerLimits
from trunkline_worker.scheduler.pace.step_cost import StepLoad
from trunkline_worker.scheduler.queue.waiting import Waiting
from trunkline_worker.scheduler.running_set import RunningSet
from trunkline_worker.scheduler.sequence_table import SequenceTable
from trunkline_worker.scheduler.step_outputs import StepOutputs
from trunkline_worker.scheduler.steps_in_flight import StepsInFlight
from trunkline_worker.step.plan import SequenceStep, StepPlan, StepResult


@dataclass(slots=True, eq=False, kw_only=True)
class Repeats:
    """most(plan) asks, repeat() does, and commit() takes in the results."""

    limits: SchedulerLimits
    running: RunningSet
    waiting: Waiting
    batching: BatchingPolicy
    blocks: KVBlocks
    admission: Admission
    aging: Aging
    table: SequenceTable
    in_flight: StepsInFlight

    def most(self, plan: StepPlan) -> int:
        """How many times in a row the plan just scheduled would be scheduled, if no request arrives, no sequence ends
        before its max_tokens and no time of wakes_s() comes; at least 1."""
        running, blocks = self.running.members, self.blocks
        none_joins = (
            not len(self.waiting)
            or self.running.is_blocked
            or (
                len(running) >= self.limits.max_running_requests
                and not any(lane.is_contended for lane in self.waiting.lanes)
            )
        )
        all_decode = not plan.starts and len(plan.steps) == len(running) and plan.num_decodes == len(plan.steps)
        if not (all_decode and none_joins and self.batching.admits_while_running) or self.running.is_retiring:
            return 1
        # Sequences that end with an earlier plan would leave in between.
        most = 1 + min([s.last_to_compute - s.num_scheduled for s in running])
        aged_steps = self.aging.steps_left()
        if aged_steps is not None:
            most = min(most, aged_steps)
        if most <= 1:
            return 1
        size = blocks.block_size
        spare = max(0, blocks.num_available - self.admission.most_reserved(running))
        held = sum([len(s.block_table) for s in running])
        while most > 1 and sum([-(-(s.num_scheduled + most - 1) // size) for s in running]) - held > spare:
            most //= 2
        return max(1, most)

    def repeat(self, plan: StepPlan, repeats: int) -> StepPlan:
        """Makes the plan just scheduled count `repeats` times, at most as often as most() returned."""
        blocks, sequences = self.blocks, self.table.by_id
        steps, more = [], repeats - 1
        for step in plan.steps:
            sequence = sequences[step.sequence_id]
            sequence.num_scheduled += more
            sequence.num_pending += more
            missing = blocks.num_missing(sequence, sequence.num_scheduled)
            if missing:
                step = step._replace(new_blocks=[*step.new_blocks, *blocks.grow(sequence, missing)])
            steps.append(step)
        repeated = StepPlan(plan.step_id, steps, [], plan.ended, repeats=repeats)
        self.in_flight.replace_latest(plan, repeated)
        return repeated

    def commit(self, plan: StepPlan, result: StepResult, now_s: float) -> StepOutputs:
        """Takes in the first repetitions of a plan, as many as the result has; the last one is left as a plan of its
        own. No sequence ends in them: see most().

        now_s: when the last of these repetitions was done
        """
        table, sequences = self.table, self.table.by_id
        times_s = result.repeated_times_s
        assert len(times_s) < plan.repeats, "the last repetition is committed as a step of its own"
        rest = StepPlan(plan.step_id, [], repeats=plan.repeats - len(times_s))
        num_tokens = len(times_s) * len(plan.steps)
        load = self.in_flight.loads[plan.step_id]
        left = StepLoad(load.num_tokens, load.decode_kv_tokens + num_tokens, 0.0, load.num_sequences)
        self.in_flight.replace_oldest(plan, rest, left)
        self.running.kv_tokens += num_tokens
        loads = [
            StepLoad(load.num_tokens, load.decode_kv_tokens + j * len(plan.steps), 0.0, load.num_sequences)
            for j in range(len(times_s))
        ]
        outputs = StepOutputs()
        count, block_size = len(times_s), self.blocks.block_size
        table.count_repetitions(plan, loads, result, now_s)
        for index, step in enumerate(plan.steps):
            sequence = sequences[step.sequence_id]
            sequence.token_ids += result.repeated_token_ids[index]
            outputs.handles += [step.sequence_id] * count
            outputs.token_ids += result.repeated_token_ids[index]
            sequence.num_pending -= count
            computed = sequence.num_computed + count
            if computed // block_size > sequence.num_published:
                self.running.publish(sequence, computed)
            else:
                sequence.num_computed = computed
            sequence.account.output_tokens += count
            rest.steps.append(
                SequenceStep(step.sequence_id, step.generation, step.num_computed + count, 1, (), samples=True)
            )
        return outputs
