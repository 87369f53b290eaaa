"""Bounds how often something is done that clients can ask for, so that one of them does not use up what all have. Pure:
time is passed in.
"""

from collections import OrderedDict
from dataclasses import dataclass

MOST_ACCOUNTS = 1024  # that are remembered


@dataclass(frozen=True, slots=True)
class BudgetLimits:
    """Any account may use up the budget down to the reserve. Of the reserve, each account has a small share.

    per_s, at_once: of all accounts together
    reserve: the part of `at_once` for accounts that ask little
    account_per_s, account_at_once: what one account takes of the reserve
    """

    per_s: float
    at_once: float
    reserve: float
    account_per_s: float
    account_at_once: float


class FairBudget:
    """How often it may be done now."""

    def __init__(self, limits: BudgetLimits, now_s: float) -> None:
        self._limits = limits
        self._all = _Bucket(limits.at_once, now_s)
        self._accounts: OrderedDict[str, _Bucket] = OrderedDict()  # those that took of the reserve, the latest last

    def takes(self, account: str, now_s: float) -> bool:
        """Takes one from the budget for this account, if there is room for it."""
        limits = self._limits
        left = self._all.refill(limits.per_s, limits.at_once, now_s)
        if left < 1.0:
            return False
        if left <= limits.reserve and not self._takes_of_reserve(account, now_s):
            return False
        self._all.left -= 1.0
        return True

    def _takes_of_reserve(self, account: str, now_s: float) -> bool:
        limits = self._limits
        own = self._accounts.setdefault(account, _Bucket(limits.account_at_once, now_s))
        self._accounts.move_to_end(account)
        if len(self._accounts) > MOST_ACCOUNTS:
            self._accounts.popitem(last=False)
        if own.refill(limits.account_per_s, limits.account_at_once, now_s) < 1.0:
            return False
        own.left -= 1.0
        return True


@dataclass(slots=True)
class _Bucket:
    left: float
    at_s: float

    def refill(self, per_s: float, most: float, now_s: float) -> float:
        """Returns what is left now."""
        self.left = min(most, self.left + max(0.0, now_s - self.at_s) * per_s)
        self.at_s = now_s
        return self.left
