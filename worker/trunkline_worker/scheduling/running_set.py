"""The sequences that run or wait, the blocks they hold, and what steps do to them.

Steps may be planned before the ones before them have been committed. What a sequence is then known to be is its tokens
and a number of pending ones; a result for a sequence that ended or was preempted meanwhile is dropped, and blocks that
a step in flight still writes are freed after it.
"""

from bisect import insort
from collections import deque
from operator import attrgetter

from trunkline.status import CODE_INTERNAL, INTERNAL, RequestRefused
from trunkline_worker.cache.blocks import KVBlocks
from trunkline_worker.cache.sequence import Finish, Sequence
from trunkline_worker.cache.shared_prefixes import ComputingPrefixes
from trunkline_worker.lanes.lanes import LANES, Lane
from trunkline_worker.pace.deadlines import Deadlines
from trunkline_worker.pace.limits import SchedulerLimits
from trunkline_worker.pace.step_cost import StepCost, StepLoad
from trunkline_worker.queue.drain_rate import DrainRate
from trunkline_worker.queue.waiting import Waiting
from trunkline_worker.scheduling.admission import HELD_TARGETS, Admission
from trunkline_worker.scheduling.batch_gate import BatchGate
from trunkline_worker.scheduling.news import PromptNews, SequenceNews, StepNews
from trunkline_worker.scheduling.stats import EngineStats
from trunkline_worker.step.plan import RowError, SequenceStart, StepPlan, StepResult


class RunningSet:
    """What the scheduler decides about: see scheduler.py, which adds the deciding.

    Plans are committed in the order in which they were made; abort() and submit() may come at any time.
    """

    def __init__(self, limits: SchedulerLimits, blocks: KVBlocks, stats: EngineStats) -> None:
        self.limits = limits
        self.blocks = blocks
        self.stats = stats
        self.running: list[Sequence] = []  # by rank
        self.waiting = Waiting(blocks.block_size)
        self.cost = StepCost()
        self.admission = Admission(limits, blocks, self.cost)
        self.deadlines = Deadlines(self.waiting, blocks, self.cost)
        self.drain_rate = DrainRate()
        self.gate = BatchGate(limits)
        self._prefixes = ComputingPrefixes(blocks)
        self.sequences: dict[int, Sequence] = {}  # running and waiting, by id
        self.in_flight: deque[StepPlan] = deque()
        self.loads: dict[int, StepLoad] = {}  # of plans in flight
        # Block tables of sequences that are gone or preempted, by the step in flight that still writes them.
        self._retiring: dict[int, list[list[int]]] = {}
        self._ended: list[int] = []  # rows that executors still have to forget
        self.starts: dict[int, SequenceStart] = {}  # rows that they have not been told of
        self._admitted: list[int] = []  # since last told
        self.step_id = 0  # of the latest plan
        # Nothing that waits fits (and would be the next guest), and nothing has changed since that was found out.
        self.is_blocked = False
        self.is_guest_blocked = False
        self.running_kv_tokens = 0  # context lengths of those that run, summed, as of the latest plan
        self.last_commit_s = float("nan")  # equal to nothing before the first one

    @property
    def has_work(self) -> bool:
        return bool(self.sequences)

    @property
    def is_retiring(self) -> bool:
        """Whether blocks are on their way: those that a step in flight still writes for nobody."""
        return bool(self._retiring)

    @property
    def num_retiring_blocks(self) -> int:
        """Blocks that will be available when the steps in flight are committed."""
        return sum(self.blocks.num_freed_by(table) for tables in self._retiring.values() for table in tables)

    @property
    def next_in_flight(self) -> StepPlan:
        """The oldest plan that is not committed, or what is left of it."""
        return self.in_flight[0]

    def expected_s(self, plan: StepPlan) -> float:
        """How long a plan in flight should take on the device; 0 while that is not known."""
        return self.cost.time_s(self.loads[plan.step_id]) if self.cost.is_known else 0.0

    def submit(self, sequence: Sequence) -> None:
        """Puts a sequence into the queue. Its id must be new, its sampling bounded by the pool."""
        assert sequence.sequence_id not in self.sequences, "sequence ids are unique"
        self.sequences[sequence.sequence_id] = sequence
        self.waiting.put(sequence, self.deadlines.start_by_s(sequence))
        self.stats.lanes[sequence.lane].accepted += 1
        self.something_changed()

    def abort(self, sequence_id: int, now_s: float) -> bool:
        """Drops a sequence wherever it is; its blocks are free at the next step boundary. False if it is gone."""
        sequence = self.sequences.get(sequence_id)
        if sequence is None:
            return False
        self._remove(sequence)
        self.stats.ended(sequence, Finish.ABORT, now_s)
        return True

    def finish(self, sequence_id: int, now_s: float) -> bool:
        """Drops a sequence that has ended by what only others can see, a stop string. False if it is gone."""
        sequence = self.sequences.get(sequence_id)
        if sequence is None:
            return False
        self._finished(sequence, Finish.STOP, now_s)
        return True

    def hurries(self, lane: Lane, now_s: float) -> bool:
        """Whether somebody of a lane has waited for so long, whatever for, that the others' pace counts less. Whoever
        is next may go then: by the age of the next one alone, a tenant who takes his back and sends them anew could
        hold up a lane."""
        oldest_s = self.waiting.oldest_s(lane)
        return oldest_s is not None and now_s >= oldest_s + HELD_TARGETS * self.limits.itl_target_s

    def hurries_from_s(self, after_s: float) -> float | None:
        """When a lane that can hurry begins to, later than this; None: none does."""
        if not self.limits.itl_target_s:
            return None
        oldest_s = [self.waiting.oldest_s(lane) for lane in (Lane.INTERACTIVE, Lane.STANDARD)]
        times_s = [time_s + HELD_TARGETS * self.limits.itl_target_s for time_s in oldest_s if time_s is not None]
        return min([time_s for time_s in times_s if time_s > after_s], default=None)

    def waits_for_prefix(self, sequence: Sequence) -> bool:
        """Whether somebody who runs is about to compute what a sequence that waits has next. Looks for what of it is
        cached, as Admission.fits() wants."""
        found = self.blocks.match(sequence)
        self.waiting.has_matched(sequence, found * self.blocks.block_size)
        return self._prefixes.covers_next(sequence, found)

    def join(self, sequence: Sequence, now_s: float) -> None:
        """Takes a sequence that waits into the running set. It must fit."""
        self.waiting.remove(sequence)
        self.waiting.admitted_s[sequence.lane] = now_s
        self.blocks.admit(sequence)
        insort(self.running, sequence, key=attrgetter("rank"))
        self.stats.admitted(sequence, now_s)
        account = sequence.account
        self.waiting.lanes[sequence.lane].start(account)
        sequence.has_yielded = False
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(sequence.num_computed, sequence.prompt_len)
            sequence.admitted_s = now_s
            account.cached_tokens += sequence.num_computed
            sequence.num_charged = sequence.num_computed
            self._admitted.append(sequence.sequence_id)
            self.drain_rate.admitted(sequence.lane, now_s)
        if sequence.wants_prompt_logprobs:
            sequence.prompt_logprobs = []
        self.gate.joined(sequence)
        self._prefixes.announce(sequence)
        self.starts[sequence.sequence_id] = SequenceStart(
            sequence.sequence_id,
            list(sequence.token_ids),
            sequence.prompt_len,
            list(sequence.block_table),
            sequence.sampling,
        )

    def commit(self, plan: StepPlan, result: StepResult, now_s: float) -> StepNews:
        """Takes in what a step computed. Results for sequences that are gone or were preempted are dropped.

        now_s: when the step was done
        """
        assert plan is self.in_flight[0], "commit in order"
        assert result.step_id == plan.step_id, "the result is of another step"
        assert plan.repeats == 1, "repeats.py is for plans that repeat"
        self.in_flight.popleft()
        self.cost.observe(self.loads.pop(plan.step_id), result.device_time_s)
        self._free_retired(plan.step_id)
        news = StepNews()
        stats, sequences, lanes = self.stats, self.sequences, self.stats.lanes
        last_commit_s = self.last_commit_s
        regular = [0 for _ in LANES]  # tokens that came one step after the one before
        block_size, token_ids = self.blocks.block_size, result.token_ids
        for index, (sequence_id, generation, _, num_new, _, samples) in enumerate(plan.steps):
            sequence = sequences.get(sequence_id)
            if sequence is None or sequence.generation != generation:
                stats.stale_results += samples
                continue
            computed = sequence.num_computed + num_new
            if computed // block_size > sequence.num_published:
                self.publish(sequence, computed)
            else:
                sequence.num_computed = computed
            if result.errors and index in result.errors:
                news.special.append(self._break_off(sequence, result.errors[index], now_s))
                continue
            if not samples:
                if sequence.prompt_logprobs is not None and index in result.prompt_logprobs:
                    sequence.prompt_logprobs += result.prompt_logprobs[index]
                continue
            sequence.num_pending -= 1
            token_id = token_ids[index]
            assert token_id is not None, "an entry that samples has a token or an error"
            if (
                not sequence.reported
                or token_id in sequence.end_token_ids
                or len(sequence.token_ids) == sequence.last_to_compute
                or sequence.sampling.logprobs is not None
            ):
                news.special.append(self._take_sample(sequence, index, token_id, result, now_s))
            else:
                sequence.token_ids.append(token_id)
                news.handles.append(sequence_id)
                news.token_ids.append(token_id)
            account = sequence.account
            account.output_tokens += 1
            if sequence.last_token_s == last_commit_s:
                regular[account.lane] += 1
            else:
                lanes[account.lane].output_tokens += 1
                if sequence.last_token_s is not None:
                    lanes[account.lane].itl.add(now_s - sequence.last_token_s)
            sequence.last_token_s = now_s
        for lane, count in enumerate(regular):
            if count:
                lanes[lane].itl.add(now_s - last_commit_s, count)
                lanes[lane].output_tokens += count
        self.last_commit_s = now_s
        return news

    def _break_off(self, sequence: Sequence, error: RowError, now_s: float) -> SequenceNews:
        """Ends a sequence for which a step brought an error instead of what it was to bring."""
        self._remove(sequence)
        self.stats.ended(sequence, Finish.ABORT, now_s)
        refused = RequestRefused(CODE_INTERNAL, INTERNAL, error.reason)
        return SequenceNews(sequence.sequence_id, error=refused, trace=error.trace)

    def _take_sample(
        self, sequence: Sequence, index: int, token_id: int, result: StepResult, now_s: float
    ) -> SequenceNews:
        """A sample that is more than one more token: the first, the last, or one that is to be reported on."""
        news = SequenceNews(sequence.sequence_id)
        if sequence.prompt_logprobs is not None and index in result.prompt_logprobs:
            sequence.prompt_logprobs += result.prompt_logprobs[index]
        if not sequence.reported:
            sequence.reported = True
            # A last token of it that was computed like a decode.
            sequence.account.input_tokens += max(0, len(sequence.token_ids) - sequence.num_charged)
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
            self._finished(sequence, news.finish, now_s)
        return news

    def _finished(self, sequence: Sequence, finish: Finish, now_s: float) -> None:
        self.admission.output_lengths[sequence.lane].observe(sequence.num_output)
        self._remove(sequence)
        self.stats.ended(sequence, finish, now_s)

    def publish(self, sequence: Sequence, num_computed: int) -> None:
        """Counts computed tokens, and shares the blocks that they filled."""
        self._prefixes.withdraw(sequence, until=num_computed // self.blocks.block_size)
        sequence.num_computed = num_computed
        self.blocks.publish(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Takes a sequence out of the running set. Its blocks are free once no step in flight writes them."""
        self._prefixes.withdraw(sequence)
        sequence.num_announced = 0
        self.running.remove(sequence)
        self.waiting.lanes[sequence.lane].stop(sequence.account)
        if self.starts.pop(sequence.sequence_id, None) is None:
            self._ended.append(sequence.sequence_id)
        table = self.blocks.detach(sequence)
        if self.in_flight and sequence.last_step >= self.in_flight[0].step_id:
            self._retiring.setdefault(sequence.last_step, []).append(table)
        else:
            self.blocks.free(table)
        self.something_changed()

    def _remove(self, sequence: Sequence) -> None:
        """Takes a finished or aborted sequence out."""
        del self.sequences[sequence.sequence_id]
        if sequence in self.waiting:
            self.waiting.remove(sequence)
            self.something_changed()
        else:
            self.leave(sequence)

    def _free_retired(self, step_id: int) -> None:
        for table in self._retiring.pop(step_id, ()):
            self.blocks.free(table)
            self.something_changed()

    def something_changed(self) -> None:
        """What waits is looked at again."""
        self.is_blocked = self.is_guest_blocked = False

    def take_admitted(self) -> list[int]:
        """Sequences admitted for the first time since the last call."""
        admitted, self._admitted = self._admitted, []
        return admitted

    def check_integrity(self) -> None:
        """Asserts that blocks, queues and counters agree; cheap enough for every step of a test. See KVBlocks."""
        retiring = [table for tables in self._retiring.values() for table in tables]
        self.blocks.check_integrity([*(sequence.block_table for sequence in self.running), *retiring])
        assert {id(s) for s in (*self.running, *self.waiting)} == {id(s) for s in self.sequences.values()}
        assert self.running == sorted(self.running, key=attrgetter("rank")), "the running set is out of order"
        self.waiting.check_integrity()
        self._prefixes.check_integrity(self.running)
        for sequence in self.running:
            known = len(sequence.token_ids) + sequence.num_pending
            assert sequence.num_computed <= sequence.num_scheduled <= known, "counters out of order"
            assert sequence.num_pending <= sum(plan.repeats for plan in self.in_flight), "a token is lost"
