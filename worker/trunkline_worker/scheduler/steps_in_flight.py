"""Plans that have been made and not committed, oldest first, with what each should cost."""

from collections import deque

from trunkline_worker.scheduler.pace.step_cost import StepLoad
from trunkline_worker.step.plan import StepPlan


class StepsInFlight:
    """Plans are committed in the order in which they were made."""

    def __init__(self) -> None:
        self.latest_id = 0  # step_id of the latest plan, in flight or committed
        self.loads: dict[int, StepLoad] = {}  # by step_id
        self.plans: deque[StepPlan] = deque()

    def __bool__(self) -> bool:
        return bool(self.plans)

    def add(self, plan: StepPlan, load: StepLoad) -> None:
        self.latest_id = plan.step_id
        self.plans.append(plan)
        self.loads[plan.step_id] = load

    def take(self, plan: StepPlan) -> StepLoad:
        """Removes the oldest plan, which is committed now, and returns its load."""
        assert plan is self.plans[0], "commit in order"
        self.plans.popleft()
        return self.loads.pop(plan.step_id)

    def writes(self, step_id: int) -> bool:
        """Whether a step is still in flight, and so may write the blocks of its sequences."""
        return bool(self.plans) and step_id >= self.plans[0].step_id
