"""The engine loop: schedule → launch → collect → commit.

Steps are computed on a device or on another thread, so that requests are taken in and their grammars are compiled
meanwhile. If the executor allows it (`run_ahead`), a step is scheduled while the one before it runs, so that the device
never waits for the host. It is scheduled late, shortly before the step in flight is expected to be done, so that
requests which arrive until then take part instead of waiting for one more step. Time comes from a clock that is passed
in, so the same loop runs in virtual time.

Where grammars constrain sequences, their masks are made by another process while the forward pass runs. Rows sit out
whose mask has not arrived when the next step has to be scheduled or, without running ahead, when that pass is done.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from trunkline.engine.v1.engine_pb2 import EngineOutput, EngineRequest, EngineStep
from trunkline.status import (
    CODE_INTERNAL,
    CODE_INVALID_ARGUMENT,
    CONTEXT_LENGTH_EXCEEDED,
    INTERNAL,
    RequestRefused,
    invalid,
)
from trunkline.v1.worker_pb2 import GetStatsResponse, LoadSample, StepCostModel, Submit
from trunkline_worker.cache.sequence import AwaitedResource, Sequence
from trunkline_worker.engine.guided_sequences import GuidedSequences, awaited
from trunkline_worker.engine.messages import (
    Prompt,
    broken_off,
    cache_events,
    fill_record,
    sequence_of,
    sequence_output,
    stats_report,
)
from trunkline_worker.engine.step_floor import FloorOfStep, StepFloor
from trunkline_worker.grammar.grammar_link import Broken, Compiled, Refused
from trunkline_worker.link.shared_grammars import complete_grammars
from trunkline_worker.runner.step_thread import ThreadedExecutor
from trunkline_worker.scheduler.deadlines import too_late
from trunkline_worker.scheduler.scheduler import Scheduler
from trunkline_worker.scheduler.sequence_table import StepOutput, StepOutputs
from trunkline_worker.scheduler.stats import StepCounts
from trunkline_worker.step.lanes import LANES, Lane, QueueBounds, lane_of, queue_full
from trunkline_worker.step.plan import Executor, StepPlan


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the engine must know about its model."""

    max_total_tokens: int  # of prompt and output together: the context length, or the KV pool if that is smaller
    eos_token_ids: frozenset[int]
    pools_every_state: bool = False  # see Sampling.needs_every_state


# A step is scheduled this long before the one in flight should be done: several times the time that scheduling takes.
PLANNING_LEAD_S = 0.5e-3
PLANNING_LEAD_STEPS = 3.0


class Engine:
    """Drives a scheduler and an executor. All calls come from one thread: see engine_process.py.

    floor: tells the least time of each step; None: it is not reported
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        limits: ModelLimits,
        clock_s: Callable[[], float],
        *,
        price_per_hour: float = 0.0,
        floor: StepFloor | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.guided: GuidedSequences | None = None  # None: no request has a grammar
        self.limits = limits
        # Called with the handles of a step before its launch: see FlightRecorder.
        self.before_launch: Callable[[list[int]], None] | None = None
        self._price_per_hour = price_per_hour
        self._floor = floor
        self._last_floor: FloorOfStep | None = None  # of the step that was committed last
        self._clock_s = clock_s
        self.use(executor)
        bounds = scheduler.limits
        self._bounds = QueueBounds(bounds.max_waiting_requests, bounds.max_waiting_tokens)
        self._arrivals = 0
        self._last_handle = 0
        self._in_flight: deque[StepPlan] = deque()
        self._waits_for_host: StepPlan | None = None  # the latest plan, while its second part has not begun
        self._host_s: deque[float] = deque()  # time it took to schedule each of these
        self._outputs: list[EngineOutput] = []  # refusals that are not reported yet
        self._plan_at_s = 0.0  # when the next step is scheduled, while one is in flight
        self._planning_s = 0.0  # recent mean time that scheduling takes
        self._launched_s = 0.0  # when the last step was launched
        self._collected_s: float | None = None  # when the last step was done, if the next one follows at once
        self._cost_told: StepCostModel | None = None
        self._fits_told = 0
        self._load_changed = False  # by an abort, which may be the only event for a while
        self._ticks_s: float | None = None  # when the grammar process must be looked after; None: it has nothing to do

    def use(self, executor: Executor) -> None:
        """Computes steps with this executor from now on. None may be in flight."""
        self.executor = executor
        # If a thread computes steps, and the next one is planned when it is done.
        self._thread = executor if isinstance(executor, ThreadedExecutor) and not executor.run_ahead else None
        self._most_in_flight = max(executor.run_ahead, self._thread is not None)
        self.scheduler.cost.defers_fits = self._most_in_flight > 0

    @property
    def has_work(self) -> bool:
        """Whether step() has something to do now or later; if not, nothing happens until the next accept()."""
        if self._outputs or self._load_changed or self._in_flight or self.scheduler.has_work:
            return True
        return self._ticks_s is not None

    def accept(self, request: EngineRequest) -> None:
        """Takes in new requests, aborts and stop strings."""
        now_s = self._clock_s()
        complete_grammars(request.submits)
        for submit in request.submits:
            self.submit(submit, Prompt(submit.prompt_token_ids[:]))  # one copy is faster than element by element
        for handle in request.abort_handles:
            self._load_changed |= self.scheduler.abort(handle, now_s)
        for handle in request.finished_handles:
            self._load_changed |= self.scheduler.finish(handle, now_s)

    def submit(self, submit: Submit, prompt: Prompt, awaits: frozenset[AwaitedResource] = frozenset()) -> None:
        """Takes in one request. The prompt is not read from the message. It is not computed before ready() was called
        for all that it awaits."""
        sequence = self._sequence(submit, prompt, self._clock_s())
        if sequence is not None:
            self._arrivals += 1
            sequence.awaits |= awaits
            self.scheduler.submit(sequence)
        self._last_handle = max(self._last_handle, submit.handle)

    def ready(self, resource: AwaitedResource) -> None:
        """A resource is there that requests may await."""
        self.scheduler.ready(resource, self._clock_s())

    def failed(self, resource: AwaitedResource, refused: RequestRefused, trace: str = "") -> None:
        """A resource will not be there: the requests that await it are refused with this error. trace: of a bug"""
        for sequence in self.scheduler.failed(resource, self._clock_s()):
            output = EngineOutput(handle=sequence.sequence_id, error=refused.to_proto(), trace=trace)
            self._outputs.append(output)

    def step(self) -> EngineStep | None:
        """Schedules and launches one step, or collects and commits the oldest one, or both: see _advance(). Returns
        None if there is nothing to report; if then no step is in flight either, nothing changes before wakes_s()."""
        return self._report(self._advance(self._clock_s()))

    def wakes_s(self) -> float | None:
        """When time alone gives step() something to do; None: never. The step in flight may be done before."""
        when_done = None if self._thread is not None else self._plan_at_s
        wakes_s = when_done if self._in_flight else self.scheduler.wakes_s()
        times_s = [time_s for time_s in (wakes_s, self._ticks_s) if time_s is not None]
        return min(times_s, default=None)

    @property
    def is_computing(self) -> bool:
        """Whether a step is in flight."""
        return bool(self._in_flight)

    @property
    def has_reports(self) -> bool:
        """Whether step() has something to report, even if there is nothing to compute."""
        return bool(self._outputs) or self._load_changed

    @property
    def is_waiting(self) -> bool:
        """Whether step(), after it returned None, has nothing to do before wakes_s(), the next accept(), or the end of
        the step in flight."""
        return not self._in_flight or self._awaits_step(self._clock_s())

    def load(self) -> LoadSample:
        """How busy the engine is now."""
        scheduler, blocks, waiting = self.scheduler, self.scheduler.blocks, self.scheduler.waiting
        now_s, backlog = self._clock_s(), scheduler.prompt_backlog
        sample = LoadSample(
            running=len(scheduler.running),
            waiting=len(waiting),
            waiting_uncached_tokens=waiting.total_tokens + sum(waiting.preempted_tokens) + sum(backlog),
            waiting_tokens=waiting.total_tokens,
            kv_live_blocks=blocks.num_live,
            kv_cached_blocks=blocks.num_cached,
            kv_free_blocks=blocks.num_available - blocks.num_cached,
            step_time_us=int(scheduler.stats.last.device_time_s * 1e6),
            waiting_by_lane=waiting.count,
            uncached_tokens_by_lane=[waiting.uncached_tokens(lane) + backlog[lane] for lane in LANES],
            step_cost=self._step_cost(),
            running_kv_tokens=scheduler.running_kv_tokens if scheduler.running else 0,
            other_experts_s=scheduler.cost.other_experts_s(len(scheduler.running)),
        )
        if len(waiting):
            sample.retry_delay_ms_by_lane.extend(self._retry_delay_ms(lane, now_s) for lane in LANES)
        return sample

    def _step_cost(self) -> StepCostModel | None:
        """The fitted cost model; None before the first fit."""
        cost = self.scheduler.cost
        if cost.num_fits != self._fits_told:
            self._fits_told = cost.num_fits
            self._cost_told = StepCostModel(
                fixed_s=cost.full_fixed_s, token_s=cost.token_s, kv_token_s=cost.kv_token_s, pair_s=cost.pair_s
            )
        return self._cost_told

    def stats(self) -> GetStatsResponse:
        """Statistics since the start."""
        now_s = self._clock_s()
        scheduler = self.scheduler
        scheduler.stats.turn_windows(now_s)
        return stats_report(scheduler.stats, scheduler, self.load(), price_per_hour=self._price_per_hour, now_s=now_s)

    # Steps

    def _advance(self, now_s: float) -> StepOutputs | None:
        """Launches one step and commits one, each if it is time for that. Returns what was committed; None: nothing."""
        self._exchange(now_s)
        self._begin_sampling(now_s)
        if self._in_flight and self._awaits_step(now_s):
            self._fit_if_due()
            return None  # requests that arrive until then can still take part in the next step
        may_plan = self._waits_for_host is None and len(self._in_flight) <= self.executor.run_ahead
        plan = self._schedule(now_s) if may_plan else None
        if plan is not None:
            self._launch(plan, now_s)
        if not self._in_flight:
            self._collected_s = None  # the device is idle until the next step
            return None
        if plan is not None and len(self._in_flight) <= self._most_in_flight:
            if self._thread is not None:
                self._fit_if_due()
            return None  # it is computed meanwhile, or another step may be given to the executor before it is collected
        return self._commit_oldest()

    def _awaits_step(self, now_s: float) -> bool:
        """Whether there is nothing to do before the step in flight is done, or expected to be done soon."""
        return (self._thread is not None or now_s < self._plan_at_s) and not self.executor.is_done()

    def _fit_if_due(self) -> None:
        """Called while a step is in flight: in commit() a fit would hold back tokens for some milliseconds."""
        if self.scheduler.cost.is_fit_due:
            self.scheduler.cost.fit()

    def _schedule(self, now_s: float) -> StepPlan | None:
        """The next plan; None if there is nothing to compute now. Requests that have become hopeless are refused."""
        if self.scheduler.faults:
            self._end_faulty(now_s)
        self._refuse_hopeless(now_s)
        return self.scheduler.schedule(now_s)

    def _launch(self, plan: StepPlan, started_s: float) -> None:
        """Hands a plan to the executor. started_s: when scheduling it began"""
        if self.before_launch is not None:
            self.before_launch([step.sequence_id for step in plan.steps])
        if self._collected_s is not None and not self.executor.run_ahead:
            self.scheduler.cost.waited(self._clock_s() - self._collected_s)
        planned_s = self._clock_s()
        if self.guided and not self._most_in_flight:
            self.guided.begin(plan.starts)  # before launch(), which may compute the forward pass
        self.executor.launch(plan)
        if self.guided and self._most_in_flight:
            self.guided.begin(plan.starts)  # after it, because the device may be idle soon
        self._in_flight.append(plan)
        self._launched_s = planned_s
        if self._most_in_flight or not plan.needs_host:
            planned_s = self._clock_s()  # otherwise launch() may have computed the forward pass
        self._host_s.append(planned_s - started_s)
        self._planning_s += 0.1 * (self._host_s[-1] - self._planning_s)
        if len(self._in_flight) == 1:
            self._time_next_plan(planned_s)
        if plan.needs_host:
            self._waits_for_host = plan
            self._exchange(planned_s)
            self._begin_sampling(planned_s)

    def _begin_sampling(self, now_s: float) -> None:
        """Gives the plan that waits for the host its masks, once every step before it is committed: when all masks are
        there, and no later than the next step is scheduled, or than a thread needs them."""
        plan = self._waits_for_host
        if plan is None or plan is not self._in_flight[0]:
            return
        is_late = now_s >= self._plan_at_s if self._thread is None else self._thread.asks_for_masks
        if is_late or self.guided is None or self.guided.has_masks(plan):
            self._waits_for_host = None
            self.executor.sample(self.scheduler.masks(plan))

    def _exchange(self, now_s: float) -> None:
        """Exchanges news with the grammar process."""
        guided, scheduler = self.guided, self.scheduler
        if guided is None:
            return
        for item in guided.exchange():
            match item:
                case Compiled(digest):
                    self.ready(awaited(digest))
                case Refused(digest, refused, trace):
                    self.failed(awaited(digest), refused, trace)
                case Broken(handle, error):
                    if scheduler.abort(handle, now_s):
                        refused = invalid("grammar", error.reason)
                        if error.trace:  # a bug, not what the request asked for
                            refused = RequestRefused(CODE_INTERNAL, INTERNAL, error.reason)
                        self._outputs.append(EngineOutput(handle=handle, error=refused.to_proto(), trace=error.trace))
        # A batch without guided sequences keeps one call.
        scheduler.masker = scheduler.runs.proposer = guided if len(guided) else None
        after_s = guided.tick()
        self._ticks_s = None if after_s is None else now_s + after_s

    def _commit_oldest(self) -> StepOutputs:
        """Waits for the oldest step, and commits it."""
        result = self.executor.collect()
        started_s = self._collected_s = self._clock_s()
        if self._thread is not None:  # it may have been done for a while
            self._collected_s = min(started_s, self._launched_s + result.device_time_s)
        plan, host_s = self._in_flight.popleft(), self._host_s.popleft()
        outputs = self.scheduler.commit(plan, result, started_s)
        if self._in_flight:
            self._time_next_plan(started_s)
        if self.guided:
            self.guided.advance(plan)
        self._begin_sampling(started_s)
        if not self.has_work:
            self._collected_s = None
        now_s = self._clock_s()
        decodes, padding = plan.num_decode_tokens, plan.num_padding + result.num_padding
        counts = StepCounts(
            prefill_tokens=plan.num_tokens - decodes,
            decode_tokens=decodes,
            padding_tokens=padding,
            sequences=len(plan.steps),
            host_time_s=host_s + now_s - started_s,
            device_time_s=result.device_time_s,
            expert_imbalance=result.expert_imbalance,
        )
        self.scheduler.stats.step(counts, now_s)
        if self._floor is not None:
            self._last_floor = self._floor.of(plan, self.scheduler.last_load)
        return outputs

    def _time_next_plan(self, begun_s: float) -> None:
        """Sets when the next step is scheduled. begun_s: when the only step in flight began"""
        if not self.executor.run_ahead:
            return
        lead_s = PLANNING_LEAD_S + PLANNING_LEAD_STEPS * self._planning_s
        self._plan_at_s = begun_s + max(0.0, self.scheduler.expected_s(self._in_flight[0]) - lead_s)

    def _report(self, step_outputs: StepOutputs | None) -> EngineStep | None:
        """The message to the front after a step; None if there is nothing to report."""
        admitted = self.scheduler.take_admitted()
        if not (step_outputs is not None or self._outputs or self._load_changed or admitted):
            return None
        outputs, self._outputs = self._outputs, []
        self._load_changed = False
        step = EngineStep(outputs=outputs, load=self.load(), last_handle=self._last_handle)
        if self.guided is not None:
            self.guided.report(step)
        for handle, admitted_s, awaited_s in admitted:
            step.admitted_handles.append(handle)
            step.admitted_s.append(admitted_s)
            if awaited_s:
                step.awaited_handles.append(handle)
                step.awaited_s.append(awaited_s)
        if preempted := self.scheduler.take_preempted():
            step.preempted_handles.extend(preempted)
        changes = self.scheduler.blocks.tree.take_changes()
        if changes:
            step.cache_events.extend(cache_events(changes))
        if step_outputs is not None:
            step.token_handles.extend(step_outputs.handles)
            step.token_ids.extend(step_outputs.token_ids)
            step.outputs.extend(map(self._message_of, step_outputs.special))
            scheduler = self.scheduler
            fill_record(step.record, step_outputs, scheduler.stats.last, scheduler.last_commit_s, self._last_floor)
        return step

    def _message_of(self, output: StepOutput) -> EngineOutput:
        """A sequence's output as a message. An exception that its values raise ends that sequence only."""
        try:
            return sequence_output(output)
        except Exception as error:
            self.scheduler.abort(output.sequence_id, self._clock_s())
            return broken_off(output.sequence_id, error)

    # Admission to the queue

    def _sequence(self, submit: Submit, prompt: Prompt, now_s: float) -> Sequence | None:
        """The sequence for the scheduler; None if the request is refused. An exception that its parameters raise fails
        this request only."""
        try:
            return self._admitted(submit, prompt, now_s)
        except RequestRefused as refused:
            self._outputs.append(EngineOutput(handle=submit.handle, error=refused.to_proto()))
        except Exception as error:
            self._outputs.append(broken_off(submit.handle, error))
        return None

    def _admitted(self, submit: Submit, prompt: Prompt, now_s: float) -> Sequence:
        """Raises RequestRefused if the request cannot be answered here, or not in time."""
        # The front has validated the request; the scheduler relies on these two conditions.
        num_tokens = len(prompt.token_ids) + len(submit.resume.output_token_ids)
        is_whole = submit.sampling.HasField("max_tokens") and submit.sampling.max_tokens == 0
        if not prompt.token_ids or num_tokens + (not is_whole) > self.limits.max_total_tokens:
            raise RequestRefused(
                CODE_INVALID_ARGUMENT,
                CONTEXT_LENGTH_EXCEEDED,
                f"{num_tokens} tokens leave no room in the {self.limits.max_total_tokens} that this worker can hold",
                field="prompt",
            )
        scheduler, waiting = self.scheduler, self.scheduler.waiting
        lane = lane_of(submit.lane)
        account = waiting.lanes[lane].account(submit.tenant, submit.tenant_weight or 1.0)
        of_tenant, tokens_of_tenant = waiting.queued_by(account)
        if not self._bounds.admits(
            lane,
            num_tokens,
            waiting=waiting.count,
            waiting_tokens=waiting.num_tokens,
            of_tenant=of_tenant,
            tokens_of_tenant=tokens_of_tenant,
            share=waiting.queue_share(account),
        ):
            scheduler.stats.lanes[lane].refused += 1
            raise queue_full(lane, waiting.count, self._retry_delay_ms(lane, now_s))
        sequence = sequence_of(
            submit,
            prompt,
            tree=scheduler.blocks.tree,
            account=account,
            arrival=self._arrivals + 1,
            now_s=now_s,
            max_total=self.limits.max_total_tokens,
            eos=self.limits.eos_token_ids,
            pools_every_state=self.limits.pools_every_state,
        )
        wait_s = scheduler.drain_rate.wait_s(sequence, waiting, now_s)
        if scheduler.deadlines.out_of_reach(sequence, wait_s, now_s):
            scheduler.stats.lanes[lane].refused += 1
            hopeless = scheduler.deadlines.out_of_reach(sequence, 0.0, now_s)
            raise too_late(None if hopeless else wait_s)
        if submit.work.HasField("grammar"):
            assert self.guided is not None, "a front sends only what the engine can do"
            self.guided.add(sequence, submit.work.grammar, submit.sampling.min_tokens)
        return sequence

    def _refuse_hopeless(self, now_s: float) -> None:
        for sequence in self.scheduler.refuse_hopeless(now_s):
            refused = too_late(self._retry_delay_ms(sequence.lane, now_s) / 1e3)
            self._outputs.append(EngineOutput(handle=sequence.sequence_id, error=refused.to_proto()))

    def _end_faulty(self, now_s: float) -> None:
        """Ends the sequences for which the scheduler's proposer or masker has raised an exception."""
        for handle, error in self.scheduler.faults:
            if self.scheduler.abort(handle, now_s):
                self._outputs.append(broken_off(handle, error))
        self.scheduler.faults.clear()

    def _retry_delay_ms(self, lane: Lane, now_s: float) -> int:
        return round(self.scheduler.drain_rate.retry_delay_s(lane, self.scheduler.waiting.count, now_s) * 1e3)
