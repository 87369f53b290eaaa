"""What clients can ask for has a rate, and one that floods the router takes nothing of what others ask for."""

from collections import Counter
from collections.abc import Sequence

from trunkline_router.record.rate_limits import MOST_ACCOUNTS, BudgetLimits, FairBudget

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


def test_an_account_takes_no_more_than_its_share_of_the_reserve() -> None:
    budget = FairBudget(LIMITS, 0.0)
    taken = sum(budget.takes("flood", 0.0) for _ in range(1000))
    assert taken == LIMITS.at_once - LIMITS.reserve + LIMITS.account_at_once
    assert sum(budget.takes("quiet", 0.0) for _ in range(1000)) == LIMITS.account_at_once


def test_it_remembers_a_bounded_number_of_accounts() -> None:
    budget = FairBudget(LIMITS, 0.0)
    for number in range(10 * MOST_ACCOUNTS):
        budget.takes(f"account-{number}", number / 1e3)
    assert len(budget._shares) <= MOST_ACCOUNTS


def test_an_account_that_tries_in_a_loop_is_not_refused_for_longer() -> None:
    """Tries without success take nothing."""
    taken = taken_in(60, FairBudget(LIMITS, 0.0), ["impatient", "flood"], per_s=5000)
    assert 0.95 * 60 * LIMITS.per_s < taken.total() <= 60 * LIMITS.per_s + LIMITS.at_once
