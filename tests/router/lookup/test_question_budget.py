"""A viewer that asks too often is refused, and is answered again as soon as its share allows."""

import pytest

from trunkline_router.access.tenants import Tenant
from trunkline_router.observe.lookup.question import MOST_LISTED, Question
from trunkline_router.observe.lookup.question_budget import LIMITS, QuestionBudget
from trunkline_router.observe.lookup.request_book import Kind
from trunkline_router.observe.lookup.viewer import Viewer


def asks(budget: QuestionBudget, question: Question, seconds: int, since_s: int = 0) -> int:
    """How many of a viewer's questions may be asked if it asks 50 times a second."""
    return sum(budget.takes(question, since_s + step / 50) for step in range(50 * seconds))


def lists(tenant: str, most: int, *kinds: Kind, is_operator: bool = False) -> Question:
    viewer = Viewer(tenant, is_operator, is_operator, True, None, Tenant(), is_listed=False)
    return Question(viewer, kinds=kinds or (Kind.ENDED,), most=most)


def test_a_page_that_asks_in_a_loop_is_answered_for_as_long_as_it_does() -> None:
    """Every question that was refused used to take what the next one would have needed."""
    budget = QuestionBudget(0.0)
    asks(budget, lists("acme", 100), 60)
    assert asks(budget, lists("acme", 100), 60, since_s=60) >= 60 * LIMITS.account_per_s / 2


@pytest.mark.slow
def test_the_longest_lists_are_answered_while_many_viewers_ask_in_a_loop() -> None:
    """At once, and seldom after that: they are paid for with the viewer's share."""
    budget, answered_at_s = QuestionBudget(0.0), []
    others, longest = [lists(f"tenant-{number}", 100) for number in range(20)], lists("acme", MOST_LISTED, *Kind)
    for step in range(50 * 600):
        for other in others:
            budget.takes(other, step / 50)
        if step > 500 and budget.takes(longest, step / 50):
            answered_at_s.append(step / 50)
    assert answered_at_s[0] < 11.0
    assert len(answered_at_s) >= 3


def test_tenants_take_nothing_of_what_operators_ask() -> None:
    budget = QuestionBudget(0.0)
    for number in range(20):
        asks(budget, lists(f"tenant-{number}", MOST_LISTED), 1)
    assert asks(budget, lists("ops", 100, is_operator=True), 1) >= 25
