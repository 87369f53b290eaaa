"""Decides, step by step, which tokens of which sequences are computed. Pure: time comes in as a number, and nothing
here knows of a device or a socket.

A step is filled in this order, under one token budget: sequences with one token to go, by rank; then, lane by lane,
chunks of prompts that have been begun, and waiting sequences. Chunks are cut so that the step stays under the time
that is set for it (step_cost.py). Who waits, and who of them is next: waiting.py and fair_share.py. Whether it fits:
admission.py.

When the pool runs dry a sequence of lower rank is preempted: its blocks go (they stay reusable until taken) and it
computes again later. Nothing is admitted in a step that preempted for growth. The highest rank always gets on, and a
sequence never outgrows an empty pool, because max_tokens is bounded by it at submission.

Steps may be scheduled before the ones before them have been committed. What a sequence is then known to be is its
tokens and a number of pending ones; a result for a sequence that ended or was preempted meanwhile is dropped, and
blocks that a step in flight still writes are freed after it.
"""

from bisect import insort
from collections import deque
from operator import attrgetter

from trunkline.status import CODE_INTERNAL, INTERNAL, RequestRefused
from trunkline_worker.admission import Admission, cheapest_victim, is_guest
from trunkline_worker.batch_gate import BatchGate
from trunkline_worker.blocks import KVBlocks
from trunkline_worker.deadlines import Deadlines
from trunkline_worker.drain_rate import DrainRate
from trunkline_worker.lanes import Lane
from trunkline_worker.limits import SchedulerLimits
from trunkline_worker.news import PromptNews, SequenceNews, StepNews
from trunkline_worker.plan import SequenceStart, SequenceStep, StepPlan, StepResult
from trunkline_worker.sequence import Finish, Sequence
from trunkline_worker.shared_prefixes import ComputingPrefixes
from trunkline_worker.stats import EngineStats
from trunkline_worker.step_budget import StepBudget
from trunkline_worker.step_cost import StepCost, StepLoad
from trunkline_worker.waiting import Waiting

# Waiting sequences looked at in one step past the first that cannot start because another one is just computing
# its prefix: bounds the cost of a step when very many wait for one prefix.
MAX_DEFERRED = 64
# Preempting is a last resort: if more than a few are needed in one step, the rest waits for the next.
MAX_PREEMPTIONS_PER_STEP = 8
# What a guest gets of each step before all others, as a divisor of the step's tokens.
GUEST_SHARE = 8
LOWER_LANES = (Lane.STANDARD, Lane.BATCH)


class Scheduler:
    """The running set, the waiting ones, and the blocks they hold.

    schedule() → plan → (executor) → commit(plan, result), plans in order; abort() and submit() may come at any time.
    """

    def __init__(self, limits: SchedulerLimits, blocks: KVBlocks, stats: EngineStats) -> None:
        self.limits = limits
        self.blocks = blocks
        self.stats = stats
        self.running: list[Sequence] = []  # by rank
        self.waiting = Waiting(blocks.block_size)
        self.cost = StepCost()
        self.admission = Admission(limits, blocks, self.cost)
        self.drain_rate = DrainRate()
        self.deadlines = Deadlines(self.waiting, self.cost)
        self._gate = BatchGate(limits)
        self._prefixes = ComputingPrefixes(blocks)
        self._sequences: dict[int, Sequence] = {}  # running and waiting, by id
        self._step_id = 0
        self._in_flight: deque[StepPlan] = deque()
        self._loads: dict[int, StepLoad] = {}  # of plans in flight
        # Block tables of sequences that are gone or preempted, by the step in flight that still writes them.
        self._retiring: dict[int, list[list[int]]] = {}
        self._ended: list[int] = []  # rows that executors still have to forget
        self._admitted: list[int] = []  # since last told
        # Nothing that waits fits, and nothing has changed since that was found out.
        self._blocked = False
        self._guest_blocked = False
        self._guest: Sequence | None = None  # the latest one
        self._preemptions_left = 0  # in this step
        self.prompt_backlog = 0  # tokens of running sequences' prompts that no step was given yet
        self._last_commit_s = 0.0

    # Asking

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    @property
    def next_in_flight(self) -> StepPlan:
        """The oldest plan that is not committed, or what is left of it."""
        return self._in_flight[0]

    def expected_s(self, plan: StepPlan) -> float:
        """How long a plan in flight should take on the device; 0 while that is not known."""
        return self.cost.time_s(self._loads[plan.step_id]) if self.cost.is_known else 0.0

    def wait_s(self, sequence: Sequence, now_s: float) -> float:
        """How long a sequence that is submitted now will wait for its admission, as far as the rate of late tells."""
        if sequence.deadline_s is None or not len(self.waiting):
            return 0.0
        ahead = self.waiting.num_due_before(sequence.lane, sequence.deadline_s)
        everyone = sum(self.waiting.count[: sequence.lane + 1])
        if not everyone:
            return 0.0
        return self.drain_rate.retry_delay_s(sequence.lane, self.waiting.count, now_s) * ahead / everyone

    def wakes_s(self) -> float | None:
        """When time alone changes what schedule() would do; None: never."""
        times = []
        if self._gate.is_open_always:
            if not self._guest_blocked and self._current_guest() is None:
                since_s = [self.waiting.neglected_since_s(lane) for lane in LOWER_LANES]
                times += [time_s + self.limits.aging_s for time_s in since_s if time_s is not None]
        elif not self.running:
            opens_s = self._gate.opens_s(min((s.arrival_s for s in self.waiting), default=0.0))
            if opens_s is not None and len(self.waiting):
                times.append(opens_s)
        hopeless_s = self.deadlines.next_s()
        return min([*times, *([] if hopeless_s is None else [hopeless_s])], default=None)

    # Acting

    def submit(self, sequence: Sequence) -> None:
        """Puts a sequence into the queue. Its id must be new, its sampling bounded by the pool."""
        assert sequence.sequence_id not in self._sequences, "sequence ids are unique"
        self._sequences[sequence.sequence_id] = sequence
        self.waiting.put(sequence)
        self.stats.lanes[sequence.lane].accepted += 1
        self._something_changed()

    def abort(self, sequence_id: int, now_s: float) -> bool:
        """Drops a sequence wherever it is; its blocks are free at the next step boundary. False if it is gone."""
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            return False
        self._remove(sequence)
        self.stats.ended(sequence, Finish.ABORT, now_s)
        return True

    def schedule(self, now_s: float) -> StepPlan | None:
        """The next step, or None if there is nothing to compute now."""
        limits = self.limits
        self._preemptions_left = MAX_PREEMPTIONS_PER_STEP
        if not self._gate.is_open_always:
            oldest_s = min((s.arrival_s for s in self.waiting), default=now_s)
            busy = len(self.running) + len(self._retiring)
            self._gate.open(num_running=busy, num_waiting=len(self.waiting), oldest_wait_s=now_s - oldest_s)
        budget = StepBudget(limits, self.cost)
        steps: list[SequenceStep] = []
        starts: list[SequenceStart] = []
        self._preempt_for_waiting(starts, now_s)
        preemptions_before = self.stats.preemptions
        chunks = self._schedule_decodes(steps, budget)
        may_admit = self.stats.preemptions == preemptions_before
        budget.decodes_are_in()
        self._schedule_prompts(steps, starts, chunks, budget, now_s, may_admit=may_admit)
        if not steps and self._gate.holds_decodes_until_prompts_are_done:
            self._schedule_decodes(steps, budget)  # the batch is complete after all
        if not steps:
            return None
        padding = None
        if not self._gate.is_open_always:
            contexts = [step.num_computed + 1 for step in steps if step.num_new == 1]
            padding = self._gate.padding(budget.tokens_left, contexts)
        self._step_id += 1
        ended, self._ended = self._ended, []
        plan = StepPlan(self._step_id, steps, starts, ended, padding)
        self._in_flight.append(plan)
        self._loads[plan.step_id] = budget.load(plan.num_padding)
        return plan

    def repeatable(self, plan: StepPlan) -> int:
        """How many times over the plan just scheduled would be scheduled again, if nothing arrives, nothing ends before
        its max_tokens and no time of wakes_s() comes; 1 if it would not."""
        budget_allows = (
            not plan.starts
            and all(step.num_new == 1 for step in plan.steps)
            and len(plan.steps) == len(self.running)
            and (not len(self.waiting) or self._blocked or len(self.running) >= self.limits.max_running_requests)
            and not self._retiring
        )
        if not budget_allows or not self._gate.is_open_always:
            return 1
        size = self.blocks.block_size
        # Sequences that a plan before this one brings to their end would leave in between.
        most = 1 + min(s.last_to_compute - s.num_scheduled for s in self.running)
        if most <= 1:
            return 1
        reserve = max(self.admission.reserve_for(s, self.running) for s in self.running)
        spare = self.blocks.num_available - reserve
        while most > 1 and sum(-(-(s.num_scheduled + most - 1) // size) for s in self.running) - sum(
            len(s.block_table) for s in self.running
        ) > max(0, spare):
            most //= 2
        return max(1, most)

    def repeat(self, plan: StepPlan, repeats: int) -> StepPlan:
        """Makes the plan just scheduled count `repeats` times, at most what repeatable() said."""
        assert self._in_flight[-1] is plan, "only the latest plan can be repeated"
        steps = []
        for step in plan.steps:
            sequence = self._sequences[step.sequence_id]
            more = repeats - 1
            sequence.num_scheduled += more
            sequence.num_pending += more
            missing = self.blocks.num_missing(sequence, sequence.num_scheduled)
            new_blocks = [*step.new_blocks, *self.blocks.grow(sequence, missing)] if missing else step.new_blocks
            steps.append(step._replace(new_blocks=new_blocks))
        repeated = StepPlan(plan.step_id, steps, [], plan.ended, repeats=repeats)
        self._in_flight[-1] = repeated
        return repeated

    def commit(self, plan: StepPlan, result: StepResult, now_s: float) -> StepNews:
        """Takes in what a step computed. Results for sequences that are gone or were preempted are dropped.

        now_s: when the step was done
        """
        assert plan is self._in_flight[0], "commit in order"
        assert result.step_id == plan.step_id, "the result is of another step"
        assert plan.repeats == 1, "commit_run() is for plans that repeat"
        self._in_flight.popleft()
        self.cost.observe(self._loads.pop(plan.step_id), result.device_time_s)
        self._free_retired(plan.step_id)
        news = StepNews()
        stats, sequences, lanes = self.stats, self._sequences, self.stats.lanes
        last_commit_s = self._last_commit_s
        regular = [0 for _ in Lane]  # tokens that came one step after the one before
        block_size = self.blocks.block_size
        for index, step in enumerate(plan.steps):
            sequence = sequences.get(step.sequence_id)
            if sequence is None or sequence.generation != step.generation:
                stats.stale_results += step.samples
                continue
            computed = sequence.num_computed + step.num_new
            if computed // block_size > sequence.num_published:
                self._publish(sequence, computed)
            else:
                sequence.num_computed = computed
            if not step.samples:
                if sequence.prompt_logprobs is not None and index in result.prompt_logprobs:
                    sequence.prompt_logprobs += result.prompt_logprobs[index]
                continue
            sequence.num_pending -= 1
            token_id = result.token_ids[index]
            if (
                token_id is None
                or not sequence.reported
                or token_id in sequence.end_token_ids
                or len(sequence.token_ids) == sequence.last_to_compute
                or sequence.sampling.logprobs is not None
            ):
                news.special.append(self._take_sample(sequence, index, result, now_s))
            else:
                sequence.token_ids.append(token_id)
                news.handles.append(sequence.sequence_id)
                news.token_ids.append(token_id)
            if token_id is None:
                continue
            account = sequence.account
            account.output_tokens += 1
            if sequence.last_token_s == last_commit_s:
                regular[account.lane] += 1
            elif sequence.num_output > 1 and sequence.last_token_s:
                lanes[account.lane].itl.add(now_s - sequence.last_token_s)
                lanes[account.lane].output_tokens += 1
            else:
                lanes[account.lane].output_tokens += 1
            sequence.last_token_s = now_s
        for lane, count in enumerate(regular):
            if count:
                lanes[lane].itl.add(now_s - last_commit_s, count)
                lanes[lane].output_tokens += count
        self._last_commit_s = now_s
        return news

    def commit_run(self, plan: StepPlan, result: StepResult, now_s: float) -> StepNews:
        """Takes in the first repetitions of a plan, as many as the result has, all but the last at most.

        now_s: when the last of these was done. Nothing ends in them: see repeatable().
        """
        assert plan is self._in_flight[0], "commit in order"
        times_s = result.repeated_times_s
        assert len(times_s) < plan.repeats, "the last repetition is committed as a step of its own"
        self._in_flight[0] = rest = StepPlan(plan.step_id, [], repeats=plan.repeats - len(times_s))
        load = self._loads[plan.step_id]
        for j, time_s in enumerate(times_s):
            kv_tokens = load.decode_kv_tokens + j * len(plan.steps)
            self.cost.observe(StepLoad(load.num_tokens, kv_tokens, 0.0), time_s)
        self._loads[plan.step_id] = StepLoad(
            load.num_tokens, load.decode_kv_tokens + len(times_s) * len(plan.steps), 0.0
        )
        news = StepNews()
        last_commit_s = self._last_commit_s
        first_s, count = result.repeated_done_s[0], len(times_s)
        regular = [0 for _ in Lane]
        for index, step in enumerate(plan.steps):
            sequence = self._sequences[step.sequence_id]
            lane = self.stats.lanes[sequence.lane]
            if sequence.last_token_s != last_commit_s:
                lane.itl.add(first_s - sequence.last_token_s)
            else:
                regular[sequence.lane] += 1
            sequence.last_token_s = now_s
            sequence.token_ids += result.repeated_token_ids[index]
            news.handles += [step.sequence_id] * count
            news.token_ids += result.repeated_token_ids[index]
            sequence.num_pending -= count
            self._publish(sequence, sequence.num_computed + count)
            sequence.account.output_tokens += count
            lane.output_tokens += count
            rest.steps.append(step._replace(num_computed=step.num_computed + count, new_blocks=()))
        before_s = last_commit_s
        for done_s in result.repeated_done_s:
            for counts, number in zip(self.stats.lanes, regular, strict=True):
                if number:
                    counts.itl.add(done_s - before_s, number)
            before_s = done_s
            regular = [sum(s.lane is lane for s in self.running) for lane in Lane]
        self._last_commit_s = now_s
        return news

    # Parts of a step

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
            start = sequence.num_scheduled
            behind = len(sequence.token_ids) + sequence.num_pending - start
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
            sequence.num_pending += 1
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
        starts: list[SequenceStart],
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
                guest_waits = not self._start_guest(guest, starts, now_s)
            if guest.block_table:
                self._chunk(guest, min(most, share), steps, budget)
                chunks = [sequence for sequence in chunks if sequence is not guest]
        if guest_waits:
            # Nobody overtakes it; the interactive lane is held up only if it alone is in the guest's way.
            may_admit = may_admit and any(sequence.lane is not Lane.INTERACTIVE for sequence in self.running)
        may_admit = may_admit and not self._blocked
        for lane in Lane:
            for sequence in chunks:
                if sequence.lane is lane and sequence.block_table:
                    self._chunk(sequence, most, steps, budget)
            if may_admit:
                may_admit = self._admit(lane, most, steps, starts, budget, now_s) and not guest_waits
        if self._gate.is_forming and not len(self.waiting):
            self._gate.close()
        self.prompt_backlog = sum(s.num_unscheduled for s in self.running) if chunks or starts else 0

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

    def _admit(
        self,
        lane: Lane,
        most: int,
        steps: list[SequenceStep],
        starts: list[SequenceStart],
        budget: StepBudget,
        now_s: float,
    ) -> bool:
        """Moves a lane's waiting sequences into the running set while there is room. False: the next one of them does
        not fit, so nobody of a lower lane is let in either."""
        deferred: set[int] = set()
        while budget.room(lane) and len(deferred) < MAX_DEFERRED and self._gate.may_join():
            sequence = self.waiting.next(lane, deferred)
            if sequence is None:
                return True
            if self._prefixes.covers_next(sequence, self.blocks.match(sequence)):
                deferred.add(sequence.sequence_id)
                continue
            if not self._fits(sequence):
                # Someone on the way out may make it fit; that is a change, and it is looked at again then.
                untouched = not self._retiring and self._preemptions_left == MAX_PREEMPTIONS_PER_STEP
                self._blocked = untouched and not deferred
                self._gate.close()
                return False
            self._start(sequence, starts, now_s)
            self._chunk(sequence, most, steps, budget)
        return True

    def _fits(self, sequence: Sequence) -> bool:
        admission, running = self.admission, self.running
        return (
            admission.has_slot(sequence, running)
            and admission.has_time(sequence, running)
            and admission.has_blocks(sequence, running)
        )

    def _start(self, sequence: Sequence, starts: list[SequenceStart], now_s: float) -> None:
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
        self._gate.joined(len(sequence.token_ids) - sequence.num_computed)
        self._prefixes.announce(sequence)
        starts.append(
            SequenceStart(
                sequence.sequence_id,
                list(sequence.token_ids),
                sequence.prompt_len,
                list(sequence.block_table),
                sequence.sampling,
            )
        )

    # The guest: see admission.py

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
            following = self.waiting.next(lane, set())
            if following and not self._prefixes.covers_next(following, self.blocks.match(following)):
                return following
            # Otherwise somebody who runs is computing for it.
        return None

    def _start_guest(self, guest: Sequence, starts: list[SequenceStart], now_s: float) -> bool:
        """Lets the guest in, if it fits."""
        guest.promised_len = self.admission.guest_promise(guest)
        if not self._fits(guest):
            guest.promised_len = 0
            self._guest_blocked = not self._retiring
            return False
        self._start(guest, starts, now_s)
        self._guest = guest
        return True

    # Making room

    def _can_grow(self, sequence: Sequence) -> bool:
        """Whether a running sequence can have one more block; sees to it that it can, if somebody ranks lower."""
        while True:
            reserve = self.admission.reserve_for(sequence, self.running)
            if self.blocks.can_grow(1, reserve):
                return True
            if self._retiring or not self._preemptions_left:
                return False  # blocks are on their way
            victim = cheapest_victim(self.running, sequence.rank, lower_lanes_only=False)
            if victim is None:
                return False  # it waits, with what it has, until somebody ends
            self._preempt(victim)

    def _preempt_for_waiting(self, starts: list[SequenceStart], now_s: float) -> None:
        """Lets in what waits in a higher lane and does not fit because of lower ones. Comes before anything else of a
        step is settled, since whoever is preempted has no part in it."""
        if self._blocked or not self._gate.is_open_always:
            return
        for lane in (Lane.INTERACTIVE, Lane.STANDARD):
            for _ in range(MAX_PREEMPTIONS_PER_STEP):
                sequence = self.waiting.next(lane, set())
                if sequence is None:
                    break  # on to the next lane
                if self._prefixes.covers_next(sequence, self.blocks.match(sequence)) or self._fits(sequence):
                    return
                self._make_room(sequence)
                if not self._fits(sequence):
                    return
                self._start(sequence, starts, now_s)

    def _make_room(self, sequence: Sequence) -> None:
        """Preempts sequences of lower lanes for one that is to be admitted, if that is enough."""
        lower = [s for s in self.running if s.lane > sequence.lane and not is_guest(s)]
        within_reach = self.blocks.num_available + sum(s.num_own_blocks for s in lower)
        if not lower or self._retiring or within_reach < self.blocks.num_fresh(sequence):
            return
        while self._preemptions_left and not self._retiring and not self._fits(sequence):
            victim = cheapest_victim(self.running, sequence.rank, lower_lanes_only=True)
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

    def _remove(self, sequence: Sequence) -> None:
        """Takes a finished or aborted sequence out."""
        del self._sequences[sequence.sequence_id]
        if sequence in self.waiting:
            self.waiting.remove(sequence)
            self._something_changed()
        else:
            self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Takes a sequence out of the running set. Its blocks are free once no step in flight writes them."""
        self._prefixes.withdraw(sequence)
        sequence.num_announced = 0
        self.running.remove(sequence)
        sequence.account.running -= 1
        self._ended.append(sequence.sequence_id)
        table = self.blocks.detach(sequence)
        if self._in_flight and sequence.last_step >= self._in_flight[0].step_id:
            self._retiring.setdefault(sequence.last_step, []).append(table)
        else:
            self.blocks.free(table)
        self._something_changed()

    def _free_retired(self, step_id: int) -> None:
        for table in self._retiring.pop(step_id, ()):
            self.blocks.free(table)
            self._something_changed()

    def _something_changed(self) -> None:
        """What waits is looked at again."""
        self._blocked = self._guest_blocked = False

    # Taking results in

    def _take_sample(self, sequence: Sequence, index: int, result: StepResult, now_s: float) -> SequenceNews:
        """A sample that is more than one more token: the first, the last, or one that is to be reported on."""
        news = SequenceNews(sequence.sequence_id)
        token_id = result.token_ids[index]
        if sequence.prompt_logprobs is not None and index in result.prompt_logprobs:
            sequence.prompt_logprobs += result.prompt_logprobs[index]
        if token_id is None:
            reason = result.errors.get(index, "the model gave no usable output")
            news.error = RequestRefused(CODE_INTERNAL, INTERNAL, reason)
            self._remove(sequence)
            self.stats.ended(sequence, Finish.ABORT, now_s)
            return news
        if not sequence.reported:
            sequence.reported = True
            sequence.first_token_s = now_s
            self.stats.first_token(sequence, now_s)
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
            self.admission.output_lengths[sequence.lane].observe(sequence.num_output)
            self._remove(sequence)
            self.stats.ended(sequence, news.finish, now_s)
        return news

    def _publish(self, sequence: Sequence, num_computed: int) -> None:
        """Counts computed tokens, and shares the blocks that they filled."""
        self._prefixes.withdraw(sequence, until=num_computed // self.blocks.block_size)
        sequence.num_computed = num_computed
        self.blocks.publish(sequence)

    def take_admitted(self) -> list[int]:
        """Sequences admitted for the first time since the last call."""
        admitted, self._admitted = self._admitted, []
        return admitted

    def refuse_hopeless(self, now_s: float) -> list[Sequence]:
        """Takes out what waits and cannot meet its deadline any more."""
        refused = []
        while (sequence := self.deadlines.hopeless(now_s)) is not None:
            self._remove(sequence)
            self.stats.lanes[sequence.lane].refused += 1
            refused.append(sequence)
        return refused

    def check_integrity(self) -> None:
        """Asserts that blocks, queues and counters agree; cheap enough for every step of a test. See KVBlocks."""
        retiring = [table for tables in self._retiring.values() for table in tables]
        self.blocks.check_integrity([*(sequence.block_table for sequence in self.running), *retiring])
        assert {id(s) for s in (*self.running, *self.waiting)} == {id(s) for s in self._sequences.values()}
        assert self.running == sorted(self.running, key=attrgetter("rank")), "the running set is out of order"
        self.waiting.check_integrity()
        self._prefixes.check_integrity(self.running)
        for sequence in self.running:
            known = len(sequence.token_ids) + sequence.num_pending
            assert sequence.num_computed <= sequence.num_scheduled <= known, "counters out of order"
            assert sequence.num_pending <= sum(plan.repeats for plan in self._in_flight), "a token is lost"
        assert sum(map(is_guest, self.running)) <= 1, "one guest at a time"
