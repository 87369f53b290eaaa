"""Plans that repeat: where nothing but time would change what is scheduled, one plan stands for many steps.

What a repetition brings is exactly what a step of its own would have; only the host does less for it.
"""

from trunkline_worker.lanes.lanes import LANES
from trunkline_worker.pace.step_cost import StepLoad
from trunkline_worker.scheduling.guest import GuestTurn
from trunkline_worker.scheduling.news import StepNews
from trunkline_worker.scheduling.running_set import RunningSet
from trunkline_worker.step.plan import SequenceStep, StepPlan, StepResult


class Repeats:
    """most(plan) asks, repeat() does, and commit() takes in what came of it."""

    def __init__(self, running_set: RunningSet, guest_turn: GuestTurn) -> None:
        self._set = running_set
        self._guest_turn = guest_turn

    def most(self, plan: StepPlan) -> int:
        """How many times over the plan just scheduled would be scheduled again, if nothing arrives, nothing ends before
        its max_tokens and no time of wakes_s() comes; 1 if it would not."""
        running_set, running, blocks = self._set, self._set.running, self._set.blocks
        nobody_joins = (
            not len(running_set.waiting)
            or running_set.is_blocked
            or (
                len(running) >= running_set.limits.max_running_requests
                and not any(lane.is_contended for lane in running_set.waiting.lanes)
            )
        )
        everybody_decodes = not plan.starts and len(plan.steps) == len(running) and plan.num_decodes == len(plan.steps)
        if not (everybody_decodes and nobody_joins) or running_set.is_retiring or not running_set.gate.is_open_always:
            return 1
        # Sequences that a plan before this one brings to their end would leave in between.
        most = 1 + min([s.last_to_compute - s.num_scheduled for s in running])
        guest_steps = self._guest_turn.steps_left()
        if guest_steps is not None:
            most = min(most, guest_steps)
        if most <= 1:
            return 1
        size = blocks.block_size
        spare = max(0, blocks.num_available - running_set.admission.most_reserved(running))
        held = sum([len(s.block_table) for s in running])
        while most > 1 and sum([-(-(s.num_scheduled + most - 1) // size) for s in running]) - held > spare:
            most //= 2
        return max(1, most)

    def repeat(self, plan: StepPlan, repeats: int) -> StepPlan:
        """Makes the plan just scheduled count `repeats` times, at most what most() said."""
        running_set, blocks = self._set, self._set.blocks
        assert running_set.in_flight[-1] is plan, "only the latest plan can be repeated"
        steps, more = [], repeats - 1
        for step in plan.steps:
            sequence = running_set.sequences[step.sequence_id]
            sequence.num_scheduled += more
            sequence.num_pending += more
            missing = blocks.num_missing(sequence, sequence.num_scheduled)
            if missing:
                step = step._replace(new_blocks=[*step.new_blocks, *blocks.grow(sequence, missing)])
            steps.append(step)
        repeated = StepPlan(plan.step_id, steps, [], plan.ended, repeats=repeats)
        running_set.in_flight[-1] = repeated
        return repeated

    def commit(self, plan: StepPlan, result: StepResult, now_s: float) -> StepNews:
        """Takes in the first repetitions of a plan, as many as the result has, all but the last at most.

        now_s: when the last of these was done. Nothing ends in them: see most().
        """
        running_set, stats = self._set, self._set.stats
        assert plan is running_set.in_flight[0], "commit in order"
        times_s = result.repeated_times_s
        assert len(times_s) < plan.repeats, "the last repetition is committed as a step of its own"
        rest = StepPlan(plan.step_id, [], repeats=plan.repeats - len(times_s))
        running_set.in_flight[0] = rest
        load = running_set.loads[plan.step_id]
        for j, time_s in enumerate(times_s):
            kv_tokens = load.decode_kv_tokens + j * len(plan.steps)
            running_set.cost.observe(StepLoad(load.num_tokens, kv_tokens, 0.0, load.num_sequences), time_s)
        running_set.running_kv_tokens += len(times_s) * len(plan.steps)
        running_set.loads[plan.step_id] = StepLoad(
            load.num_tokens, load.decode_kv_tokens + len(times_s) * len(plan.steps), 0.0, load.num_sequences
        )
        news = StepNews()
        last_commit_s = running_set.last_commit_s
        first_s, count, block_size = result.repeated_done_s[0], len(times_s), running_set.blocks.block_size
        regular = [0 for _ in LANES]
        for index, step in enumerate(plan.steps):
            sequence = running_set.sequences[step.sequence_id]
            lane = stats.lanes[sequence.lane]
            if sequence.last_token_s == last_commit_s:
                regular[sequence.lane] += 1
            elif sequence.last_token_s is not None:
                lane.itl.add(first_s - sequence.last_token_s)
            sequence.last_token_s = now_s
            sequence.token_ids += result.repeated_token_ids[index]
            news.handles += [step.sequence_id] * count
            news.token_ids += result.repeated_token_ids[index]
            sequence.num_pending -= count
            computed = sequence.num_computed + count
            if computed // block_size > sequence.num_published:
                running_set.publish(sequence, computed)
            else:
                sequence.num_computed = computed
            sequence.account.output_tokens += count
            lane.output_tokens += count
            rest.steps.append(
                SequenceStep(step.sequence_id, step.generation, step.num_computed + count, 1, (), samples=True)
            )
        before_s = last_commit_s
        everyone = [0 for _ in LANES]
        for sequence in running_set.running:
            everyone[sequence.account.lane] += 1
        for done_s in result.repeated_done_s:
            for counts, number in zip(stats.lanes, regular, strict=True):
                if number:
                    counts.itl.add(done_s - before_s, number)
            before_s = done_s
            regular = everyone
        running_set.last_commit_s = now_s
        return news
