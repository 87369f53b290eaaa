"""What clients can ask for has a rate, and one that floods the router takes nothing of what others ask for."""

from collections import Counter
from collections.abc import Sequence

from trunkline_router.record.token_bucket import MOST_ACCOUNTS, BudgetLimits, FairBudget

LIMITS = BudgetLimits(per_s=100.0, at_once=400.0)


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
    assert quiet == 100, "10 a second are its share"


def test_a_flood_of_a_few_accounts_leaves_something_for_the_next_one() -> None:
    for num_floods in (2, 4):
        budget, now_s, quiet = FairBudget(LIMITS, 0.0), 0.0, 0
        for step in range(100_000):
            now_s += 1e-3
            budget.takes(f"flood-{step % num_floods}", now_s)
            if step % 10_000 == 9_999:
                quiet += budget.takes("quiet", now_s)
        assert quiet == 10, num_floods


def test_it_remembers_a_bounded_number_of_accounts() -> None:
    budget = FairBudget(LIMITS, 0.0)
    for number in range(10 * MOST_ACCOUNTS):
        budget.takes(f"account-{number}", number / 1e3)
    assert len(budget._accounts) <= MOST_ACCOUNTS
