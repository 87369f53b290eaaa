"""Plans that have been made and not committed, oldest first, with what each should cost."""

from collections import deque

from trunkline_worker.scheduler.pace.step_cost import StepLoad
from trunkline_worker.step.plan import StepPlan


class StepsInFlight:
    """Plans are committed in the order in which they were made."""

    def __init__(self) -> None:
        self.latest_id = 0  # step_id of the latest plan, in flight or committed
        self.loads: dict[int, StepLoad] = {}  # by step_id
        self._plans: deque[StepPlan] = deque()

    def __bool__(self) -> bool:
        return bool(self._plans)

    @property
    def oldest(self) -> StepPlan:
        """The plan that is committed next. There must be one."""
        return self._plans[0]

    @property
    def num_steps(self) -> int:
        """Steps that the plans stand for, repetitions included."""
        return sum(plan.repeats for plan in self._plans)

    def add(self, plan: StepPlan, load: StepLoad) -> None:
        self.latest_id = plan.step_id
        self._plans.append(plan)
        self.loads[plan.step_id] = load

    def take(self, plan: StepPlan) -> StepLoad:
        """Removes the oldest plan, which is committed now, and returns its load."""
        assert plan is self._plans[0], "commit in order"
        self._plans.popleft()
        return self.loads.pop(plan.step_id)

    def writes(self, step_id: int) -> bool:
        """Whether a step is still in flight, and so may write the blocks of its sequences."""
        return bool(self._plans) and step_id >= self._plans[0].step_id

    def replace_latest(self, plan: StepPlan, other: StepPlan) -> None:
        """Puts another plan of the same step in the place of the one just made."""
        assert self._plans[-1] is plan, "only the latest plan can be replaced"
        self._plans[-1] = other

    def replace_oldest(self, plan: StepPlan, rest: StepPlan, load: StepLoad) -> None:
        """Leaves the rest of a plan of which some repetitions have been committed."""
        assert plan is self._plans[0], "commit in order"
        self._plans[0] = rest
        self.loads[plan.step_id] = load
