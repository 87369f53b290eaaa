"""What clients can ask for has a rate, and one that floods the router takes nothing of what others ask for."""

from collections import Counter
from collections.abc import Sequence

from trunkline_router.record.fair_budget import IDLE_S, MOST_ACCOUNTS, BudgetLimits, FairBudget

LIMITS = BudgetLimits(per_s=100.0, at_once=400.0, reserve=200.0, account_per_s=20.0, account_at_once=40.0)


def taken_in(seconds: int, budget: FairBudget, accounts: Sequence[str], per_s: int) -> Counter[str]:
    """What is taken of the budget if each account asks so often a second."""
    taken: Counter[str] = Counter()
    for step in range(seconds * per_s):
        for account in accounts:
            taken[account] += budget.takes(account, step / per_s)
    return taken


def test_one_account_alone_has_the_whole_rate() -> None:
    taken = taken_in(60, FairBudget(LIMITS, 0.0), ["only"], per_s=1000)
    assert 0.9 * 60 * LIMITS.per_s < taken["only"] < 60 * LIMITS.per_s + LIMITS.at_once


def test_an_account_that_asks_little_is_not_crowded_out() -> None:
    budget = FairBudget(LIMITS, 0.0)
    taken_in(60, budget, ["flood"], per_s=1000)
    quiet = 0
    for step in range(10_000):
        now_s = 60.0 + step / 1000
        budget.takes("flood", now_s)
        if step % 100 == 0:
            quiet += budget.takes("quiet", now_s)
    assert quiet == 100, f"10 a second are fewer than {LIMITS.account_per_s}"


def test_many_accounts_leave_something_for_the_next_one() -> None:
    for num_floods in (10, 200):
        budget, now_s, quiet = FairBudget(LIMITS, 0.0), 0.0, 0
        for step in range(100_000):
            now_s += 1e-3
            budget.takes(f"flood-{step % num_floods}", now_s)
            if step % 10_000 == 9_999:
                quiet += budget.takes("quiet", now_s)
        assert quiet == 10, num_floods


def test_idle_accounts_are_forgotten_so_that_the_others_have_their_shares() -> None:
    budget = FairBudget(LIMITS, 0.0)
    taken_in(10, budget, [f"account-{number}" for number in range(100)], per_s=10)
    now_s = 10.0 + IDLE_S
    taken = sum(budget.takes("one", now_s + step / 1000) for step in range(1000))
    assert len(budget._accounts) == 1
    assert taken >= LIMITS.at_once - LIMITS.reserve + LIMITS.account_at_once


def test_it_remembers_a_bounded_number_of_accounts() -> None:
    budget = FairBudget(LIMITS, 0.0)
    for number in range(10 * MOST_ACCOUNTS):
        budget.takes(f"account-{number}", number / 1e3)
    assert len(budget._accounts) <= MOST_ACCOUNTS


def test_an_account_that_is_known_keeps_its_share_whatever_names_are_invented() -> None:
    budget, quiet = FairBudget(LIMITS, 0.0), 0
    taken_in(1, budget, ["flood"], per_s=1000)
    assert budget.takes("quiet", 1.0), "of the reserve: from now on it is known"
    for step in range(300 * 200):
        now_s = 1.0 + (step + 1) / 200
        budget.takes(f"invented-{step}", now_s)
        if step % 6_000 == 5_999:
            quiet += budget.takes("quiet", now_s)
    assert quiet == 10, "one in 30 s is less than its share"


def test_new_accounts_together_take_of_the_reserve_what_one_may() -> None:
    budget = FairBudget(LIMITS, 0.0)
    taken = sum(budget.takes(f"invented-{number}", 0.0) for number in range(1000))
    assert taken == LIMITS.at_once - LIMITS.reserve + LIMITS.account_at_once


def test_an_account_that_tries_in_a_loop_is_not_refused_for_longer() -> None:
    """Tries without success take nothing."""
    taken = taken_in(60, FairBudget(LIMITS, 0.0), ["impatient", "flood"], per_s=5000)
    assert 0.95 * 60 * LIMITS.per_s < taken.total() <= 60 * LIMITS.per_s + LIMITS.at_once
