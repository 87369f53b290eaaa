"""How many questions a router process asks, or answers. Pure: time is passed in."""

import math

from trunkline_router.observe.lookup.question import Question
from trunkline_router.record.fair_budget import BudgetLimits, FairBudget

REQUESTS_FOR_ONE = 60  # a longer list counts as several questions
# A tenant that asks in a loop, perhaps through many routers, gets what the others leave. A list that
# is longer than its share is answered once, and paid for by its later questions.
LIMITS = BudgetLimits(per_s=20.0, at_once=100.0, reserve=75.0, account_per_s=2.0, account_at_once=25.0)


class QuestionBudget:
    """Operators have a budget of their own, so that no tenant's questions take the place of theirs."""

    def __init__(self, now_s: float) -> None:
        self._of_operators = FairBudget(LIMITS, now_s)
        self._of_tenants = FairBudget(LIMITS, now_s)

    def takes(self, question: Question, now_s: float) -> bool:
        """Takes what a question costs, if there is room for it."""
        viewer = question.viewer
        budget = self._of_operators if viewer.is_operator else self._of_tenants
        cost = max(1, math.ceil(question.most_in_all / REQUESTS_FOR_ONE))
        return budget.takes(viewer.tenant, now_s, cost)
