"""A workload through the engine in virtual time: the same scheduler, blocks and loop, before a simulated executor."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from trunkline.engine.v1.engine_pb2 import EngineStep
from trunkline.status import CONTEXT_LENGTH_EXCEEDED
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.worker_pb2 import GetStatsResponse, Submit
from trunkline_bench.simulation.simulated_executor import END_TOKEN, SimulatedExecutor, StepCost, VirtualClock
from trunkline_bench.simulation.step_series import StepSeries
from trunkline_bench.simulation.traces import TraceRequest
from trunkline_worker.blocks import KVBlocks
from trunkline_worker.engine import Engine, ModelLimits
from trunkline_worker.lanes import Lane, lane_number
from trunkline_worker.limits import SchedulerLimits
from trunkline_worker.prefix_tree import PrefixTree
from trunkline_worker.scheduler import Scheduler
from trunkline_worker.stats import EngineStats
from trunkline_worker.submission import Prompt

FINGERPRINT = "simulated"  # of the model whose blocks are hashed


@dataclass(slots=True)
class Outcome:
    """What became of one request. Times in seconds from the replay's start."""

    request: TraceRequest
    first_token_s: float | None = None
    done_s: float | None = None
    output_tokens: int = 0
    cached_tokens: int = 0
    refused: str = ""  # the reason
    retry_delay_s: float = 0.0

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.request.arrival_s


@dataclass(slots=True)
class Replayed:
    """A whole run."""

    outcomes: list[Outcome]
    stats: GetStatsResponse
    series: StepSeries
    duration_s: float  # virtual time from the first arrival to the last event
    admitted: list[tuple[float, int]] = field(default_factory=list)  # (time, index of the request), in order


@dataclass(frozen=True, slots=True)
class Worker:
    """What is simulated."""

    cost: StepCost
    num_blocks: int
    block_size: int
    limits: SchedulerLimits
    context_length: int = 131_072
    run_ahead: int = 1
    host_s: float = 0.0
    fast_forward: bool = True

    @property
    def max_total_tokens(self) -> int:
        """Of prompt and output together: the context, or the KV pool where that is smaller."""
        return min(self.context_length, self.num_blocks * self.block_size)

    def can_hold(self, request: TraceRequest) -> bool:
        """Whether there is room for the prompt and one token more."""
        return request.prompt_tokens < self.max_total_tokens


class StatsOfAllTime(EngineStats):
    """The engine's statistics forget what is a minute or two old; a run's are of the whole of it."""

    def turn_windows(self, now_s: float) -> None:
        pass


def replay(
    requests: list[TraceRequest],
    worker: Worker,
    *,
    tenant_weights: dict[str, float] | None = None,
    until_s: float = float("inf"),
    on_step: Callable[[float, Engine], None] | None = None,
) -> Replayed:
    """Runs requests in order of arrival; stops when all are done, or at `until_s`.

    Requests that ask for more than the worker can hold are refused, as the engine would: before their prompts are made,
    which might not fit in memory.

    Raises RuntimeError where requests are left and nothing will ever happen: the engine has lost sight of them.
    """
    clock = VirtualClock()
    lengths = {handle: request.output_tokens for handle, request in enumerate(requests)}
    stats = StatsOfAllTime(0.0)
    engine, executor = simulated_engine(worker, clock, lengths, stats)
    outcomes = [Outcome(request) for request in requests]
    run = Replayed(outcomes, GetStatsResponse(), StepSeries(), 0.0)
    weights = tenant_weights or {}
    upcoming = 0
    while clock.now_s < until_s and (upcoming < len(requests) or engine.has_work):
        while upcoming < len(requests) and requests[upcoming].arrival_s <= clock.now_s:
            if worker.can_hold(requests[upcoming]):
                request = requests[upcoming]
                weight = weights.get(request.tenant, 1.0)
                engine.submit(submit_of(upcoming, request, weight), Prompt(request.prompt()))
            else:
                outcomes[upcoming].refused = CONTEXT_LENGTH_EXCEEDED
                outcomes[upcoming].done_s = clock.now_s
            upcoming += 1
        next_s = requests[upcoming].arrival_s if upcoming < len(requests) else float("inf")
        engine.next_arrival_s = min(next_s, until_s)
        step = engine.step() if engine.has_work else None
        if step is not None:
            _record(step, clock.now_s, run, stats, engine)
            if on_step is not None:
                on_step(clock.now_s, engine)
        elif engine.is_waiting and (upcoming < len(requests) or engine.has_work):
            wakes_s = engine.wakes_s() if engine.has_work else None
            times_s = [next_s, executor.next_done_s, *([] if wakes_s is None else [wakes_s])]
            event_s = min((time_s for time_s in times_s if time_s > clock.now_s), default=float("inf"))
            if event_s == float("inf"):
                left = sum(outcome.done_s is None for outcome in outcomes)
                raise RuntimeError(
                    f"the engine is stuck: {left} requests are left at {clock.now_s:.3f} s of virtual time, and there "
                    "is nothing to wait for"
                )
            clock.advance_to(min(event_s, until_s))
    run.stats = engine.stats()
    run.duration_s = clock.now_s - (requests[0].arrival_s if requests else 0.0)
    return run


def simulated_engine(
    worker: Worker, clock: VirtualClock, output_lengths: Mapping[int, int], stats: EngineStats
) -> tuple[Engine, SimulatedExecutor]:
    """The engine loop before an executor that takes its time from `clock`. output_lengths: by handle."""
    executor = SimulatedExecutor(worker.cost, clock, output_lengths, run_ahead=worker.run_ahead, host_s=worker.host_s)
    engine = Engine(
        Scheduler(worker.limits, KVBlocks(worker.num_blocks, PrefixTree(FINGERPRINT, worker.block_size)), stats),
        executor,
        ModelLimits(worker.max_total_tokens, frozenset([END_TOKEN])),
        clock,
        repeating=executor if worker.fast_forward else None,
    )
    return engine, executor


def submit_of(handle: int, request: TraceRequest, tenant_weight: float = 1.0) -> Submit:
    """A request as the engine gets it, but for its prompt. max_tokens is left open: nobody knows how long an answer
    will be."""
    return Submit(
        handle=handle,
        sampling=SamplingParams(seed=0),
        lane=lane_number(Lane[request.lane.upper()]),  # type: ignore[arg-type]
        tenant=request.tenant,
        tenant_weight=tenant_weight,
    )


def _record(step: EngineStep, now_s: float, run: Replayed, stats: EngineStats, engine: Engine) -> None:
    for output in step.outputs:
        outcome = run.outcomes[output.handle]
        if output.HasField("error"):
            outcome.refused = output.error.reason
            outcome.retry_delay_s = output.error.retry_delay_ms / 1e3
            outcome.done_s = now_s
            continue
        outcome.output_tokens += len(output.token_ids)
        if output.HasField("prompt"):
            outcome.first_token_s = now_s
            outcome.cached_tokens = output.prompt.cached_tokens
        if output.finish_reason:
            outcome.done_s = now_s
    for handle in step.token_handles:
        run.outcomes[handle].output_tokens += 1
    run.admitted += [(now_s, handle) for handle in step.admitted_handles]
    run.series.add(now_s, step.load, stats.last)
