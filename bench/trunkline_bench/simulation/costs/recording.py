"""Records work and time of an engine's steps, to which a cost is fitted."""

from collections import deque

from trunkline_bench.simulation.costs.fitted_cost import Sample
from trunkline_bench.simulation.costs.step_work import StepWork, work_of
from trunkline_worker.step.plan import Executor, Masks, StepPlan, StepResult


class RecordingExecutor:
    """Wraps an executor and records a sample of each of its steps."""

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self._works: deque[StepWork] = deque()
        self.run_ahead = inner.run_ahead
        self.samples: list[Sample] = []

    def launch(self, plan: StepPlan) -> None:
        self._works.append(work_of(plan))
        self._inner.launch(plan)

    def sample(self, masks: Masks) -> None:
        self._inner.sample(masks)

    def is_done(self) -> bool:
        return self._inner.is_done()

    def collect(self) -> StepResult:
        result = self._inner.collect()
        self.samples.append((self._works.popleft(), result.device_time_s))
        return result
