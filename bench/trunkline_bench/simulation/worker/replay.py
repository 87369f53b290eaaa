"""Runs a workload through one simulated worker."""

from dataclasses import dataclass, field
from functools import partial

from trunkline.engine.v1.engine_pb2 import EngineStep
from trunkline.status import CONTEXT_LENGTH_EXCEEDED
from trunkline.v1.worker_pb2 import GetStatsResponse
from trunkline_bench.simulation.traces.trace_request import TraceRequest
from trunkline_bench.simulation.worker.outcome import Outcome, record
from trunkline_bench.simulation.worker.simulated_worker import SimulatedWorker, WorkerSpec, submit_of
from trunkline_bench.simulation.worker.step_series import StepSeries
from trunkline_worker.engine.messages import Prompt


@dataclass(slots=True)
class Replayed:
    """The result of a run."""

    outcomes: list[Outcome]
    stats: GetStatsResponse
    series: StepSeries
    duration_s: float  # virtual time from the first arrival to the last event
    admitted: list[tuple[float, int]] = field(default_factory=list)  # (time, index of the request), in order of time


def replay(
    requests: list[TraceRequest],
    spec: WorkerSpec,
    *,
    tenant_weights: dict[str, float] | None = None,
    until_s: float = float("inf"),
) -> Replayed:
    """Runs requests in order of arrival until all are done, or until `until_s`.

    Requests that exceed the worker's capacity are refused as the engine would, but before their prompts are made, which
    might not fit in memory. Raises RuntimeError if the engine is stuck, as SimulatedWorker.advance does.
    """
    run = Replayed([Outcome(request) for request in requests], GetStatsResponse(), StepSeries(), 0.0)

    def on_step(now_s: float, step: EngineStep) -> None:
        record(step, now_s, run.outcomes)
        run.admitted += [(now_s, handle) for handle in step.admitted_handles]
        run.series.add(now_s, step.load, worker.stats.last)

    worker = SimulatedWorker(spec, on_step)
    weights = tenant_weights or {}
    last_s = 0.0  # time of the last arrival
    for handle, request in enumerate(requests):
        last_s = min(request.arrival_s, until_s)
        if last_s == until_s:
            break
        if spec.can_hold(request):
            submit = submit_of(handle, request, weights.get(request.tenant, 1.0))
            worker.submit(request.arrival_s, submit, partial(_prompt_of, request), request.output_tokens)
        else:
            run.outcomes[handle].refuse(CONTEXT_LENGTH_EXCEEDED, request.arrival_s)
    worker.advance(until_s)
    run.stats = worker.engine.stats()
    end_s = max(worker.clock.now_s, until_s if worker.has_work else last_s)
    run.duration_s = end_s - (requests[0].arrival_s if requests else 0.0)
    return run


def _prompt_of(request: TraceRequest) -> Prompt:
    return Prompt(request.prompt())
