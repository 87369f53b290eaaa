"""One simulated worker: the real engine loop with its scheduler and blocks, an executor that computes nothing, and a
clock of its own. The caller advances it to a time."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trunkline.engine.v1.engine_pb2 import EngineStep
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.worker_pb2 import LoadSample, Submit
from trunkline_bench.simulation.traces.trace_request import TraceRequest
from trunkline_bench.simulation.worker.fast_forward import FastForwardEngine, FastForwardScheduler
from trunkline_bench.simulation.worker.simulated_executor import (
    END_TOKEN,
    SimulatedExecutor,
    StepCost,
    VirtualClock,
)
from trunkline_kernels.routing_rule import RoutingRule
from trunkline_worker.cache.blocks import KVBlocks
from trunkline_worker.cache.prefix_tree import PrefixTree
from trunkline_worker.engine.engine import Engine, ModelLimits
from trunkline_worker.engine.messages import Prompt
from trunkline_worker.front.cache_mirror import LOAD_INTERVAL_S
from trunkline_worker.scheduler.limits import SchedulerLimits
from trunkline_worker.scheduler.scheduler import Scheduler
from trunkline_worker.scheduler.stats import EngineStats
from trunkline_worker.step.lanes import Lane, lane_number

FINGERPRINT = "simulated"  # of the model, for block hashes
NEVER_S = float("inf")


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """The configuration of a simulated worker."""

    cost: StepCost
    num_blocks: int
    block_size: int
    limits: SchedulerLimits
    context_length: int = 131_072
    run_ahead: int = 1
    host_s: float = 0.0
    fast_forward: bool = True
    routing: RoutingRule | None = None  # of the model's experts; None: it has none

    @property
    def max_total_tokens(self) -> int:
        """Largest sum of prompt and output: the context length, or the KV pool's capacity if that is smaller."""
        return min(self.context_length, self.num_blocks * self.block_size)

    def can_hold(self, request: TraceRequest) -> bool:
        """Whether the prompt and one output token fit."""
        return request.prompt_tokens < self.max_total_tokens


class StatsOfAllTime(EngineStats):
    """Statistics of the whole run: unlike the engine's, they do not expire after a minute or two."""

    def turn_windows(self, now_s: float) -> None:
        pass


class SimulatedWorker:
    """The real engine on a simulated device with a clock of its own.

    on_step: called with the time and every EngineStep; on_load: called with the time and the newest load sample when
    the worker's front would send it, at most once per LOAD_INTERVAL_S. These times are fixed rather than relative to
    the first change, so that an engine that repeats plans sends the same samples as one that does not.
    load_phase_s: the first of these times
    """

    def __init__(
        self,
        spec: WorkerSpec,
        on_step: Callable[[float, EngineStep], None],
        on_load: Callable[[float, LoadSample], None] | None = None,
        *,
        load_phase_s: float = 0.0,
    ) -> None:
        self.stats = StatsOfAllTime(0.0)
        self.clock = VirtualClock()
        self._output_lengths: dict[int, int] = {}  # of requests that have not ended, by handle
        self._executor = SimulatedExecutor(
            spec.cost, self.clock, self._output_lengths, run_ahead=spec.run_ahead, host_s=spec.host_s
        )
        blocks = KVBlocks(spec.num_blocks, PrefixTree(FINGERPRINT, spec.block_size))
        limits = ModelLimits(spec.max_total_tokens, frozenset([END_TOKEN]))
        self._fast: FastForwardEngine | None = None
        if spec.fast_forward:
            scheduler = FastForwardScheduler(spec.limits, blocks, self.stats)
            self._fast = FastForwardEngine(scheduler, self._executor, limits, self.clock)
        self.engine = self._fast or Engine(
            Scheduler(spec.limits, blocks, self.stats), self._executor, limits, self.clock
        )
        self.engine.scheduler.cost.routing = spec.routing
        self._on_step = on_step
        self._on_load = on_load
        # Submits in transit: (arrival time, submit, function that makes the prompt).
        self._submits: deque[tuple[float, Submit, Callable[[], Prompt]]] = deque()
        self._next_s = NEVER_S  # the engine's next event, unless a submit arrives earlier
        self._load: LoadSample | None = None  # to be sent
        self._load_at_s = NEVER_S if on_load is None else load_phase_s
        self.due_s = NEVER_S  # the next time at which advance() has work; read at every event of the fleet

    @property
    def has_work(self) -> bool:
        """Whether requests are in transit or in the engine."""
        return bool(self._submits) or self.engine.has_work

    @property
    def busy_s(self) -> float:
        """Device time so far."""
        return self.stats.total.device_time_s

    def submit(self, at_s: float, submit: Submit, prompt: Callable[[], Prompt], output_tokens: int) -> None:
        """Adds a submit that arrives at `at_s`, which must not be before earlier submits or the last advance().

        prompt: makes the prompt when the submit arrives, since all prompts of a long trace do not fit in memory
        """
        self._output_lengths[submit.handle] = output_tokens
        self._submits.append((at_s, submit, prompt))
        self.due_s = min(self.due_s, self.next_s)

    @property
    def repeats_done_s(self) -> Sequence[float]:
        """When the steps ended that on_step gets together in one message; empty if it gets a single step."""
        return () if self._fast is None else self._fast.repeats_done_s

    @property
    def next_s(self) -> float:
        """Time of the next event."""
        if not self._submits:
            return self._next_s
        # A submit that arrived while a step was collected is seen after the step.
        return min(self._next_s, max(self._submits[0][0], self.clock.now_s))

    def advance(self, until_s: float) -> None:
        """Runs all events that begin before `until_s`. The results of a step are reported when it ends.

        Later submits must not arrive before `until_s`. Raises RuntimeError if requests are left but no event can
        follow, which is a bug of the engine.
        """
        while True:
            event_s = self.next_s
            if self._load is not None and self._load_at_s < min(event_s, until_s):
                self._send_load()
            elif event_s >= until_s:
                self.due_s = event_s if self._load is None else min(event_s, self._load_at_s)
                return
            else:
                self.clock.advance_to(event_s)
                self._run(until_s)

    def _run(self, until_s: float) -> None:
        """Runs the engine until it has nothing to do or `until_s` has passed, and sets `_next_s`."""
        clock, engine, submits = self.clock, self.engine, self._submits
        while clock.now_s < until_s:
            if self._load is not None and self._load_at_s <= clock.now_s:
                self._send_load()
            while submits and submits[0][0] <= clock.now_s:
                _, submit, prompt = submits.popleft()
                engine.submit(submit, prompt())
            if not engine.has_work:
                self._next_s = NEVER_S
                return
            if self._fast is not None:  # repeated plans stop at the next submit or load sample
                known_s = min(until_s, submits[0][0]) if submits else until_s
                self._fast.next_arrival_s = min(known_s, self._next_load_s())
            step = engine.step()
            if step is not None:
                self._tell(step)
            elif engine.is_waiting:
                wakes_s, now_s = engine.wakes_s(), clock.now_s
                self._next_s = done_s if (done_s := self._executor.next_done_s) > now_s else NEVER_S
                if wakes_s is not None and wakes_s > now_s:
                    self._next_s = min(self._next_s, wakes_s)
                if self._next_s == NEVER_S and not submits:
                    raise RuntimeError(
                        f"an engine is stuck: {len(self._output_lengths)} requests are left at {now_s:.3f} s of "
                        "virtual time, and there is nothing to wait for"
                    )
                return
        self._next_s = clock.now_s

    def _next_load_s(self) -> float:
        """The time of the next load sample, which is skipped if the load has not changed."""
        if self._load is None and self._load_at_s <= self.clock.now_s:
            periods = int((self.clock.now_s - self._load_at_s) / LOAD_INTERVAL_S) + 1
            self._load_at_s += periods * LOAD_INTERVAL_S
        return self._load_at_s

    def _tell(self, step: EngineStep) -> None:
        now_s = self.clock.now_s
        if self._on_load is not None:
            if self._load is not None and self._load_at_s < now_s:
                self._send_load()
            self._next_load_s()
            self._load = step.load
        for output in step.outputs:
            if output.finish_reason or output.HasField("error"):
                del self._output_lengths[output.handle]
        self._on_step(now_s, step)

    def _send_load(self) -> None:
        assert self._on_load is not None
        assert self._load is not None
        self._on_load(self._load_at_s, self._load)
        self._load = None
        self._load_at_s += LOAD_INTERVAL_S


def submit_of(handle: int, request: TraceRequest, tenant_weight: float = 1.0) -> Submit:
    """A request as the engine receives it, without its prompt. max_tokens is not set, since the length of the answer
    must not be known."""
    return Submit(
        handle=handle,
        sampling=SamplingParams(seed=0),
        lane=lane_number(Lane[request.lane.upper()]),  # type: ignore[arg-type]
        tenant=request.tenant,
        tenant_weight=tenant_weight,
    )
