"""Bounds how often something is done that clients can ask for, so that one of them does not use up what all have. Pure:
time is passed in.
"""

from collections import OrderedDict
from dataclasses import dataclass

from trunkline_router.record.token_bucket import TokenBucket

MOST_ACCOUNTS = 1024  # that are remembered: those that asked last


@dataclass(frozen=True, slots=True)
class BudgetLimits:
    """Any account may use up the budget down to the reserve. Of the reserve, each account has a share.

    per_s, at_once: of all accounts together
    reserve: the part of `at_once` for accounts that ask little
    account_per_s, account_at_once: what one account takes of the reserve at most
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
        self._all = TokenBucket(limits.per_s, limits.at_once, now_s)
        self._shares: OrderedDict[str, TokenBucket] = OrderedDict()  # of accounts; the latest is the last

    def takes(self, account: str, now_s: float) -> bool:
        """Takes one from the budget for this account, if there is room for it. Otherwise it takes nothing, so that an
        account that asks again and again is not refused for longer than one that waits."""
        left = self._all.left(now_s)
        if left < 1.0 or (left < self._limits.reserve + 1.0 and not self._share(account, now_s).takes(1.0, now_s)):
            return False
        self._all.charge(1.0, now_s)
        return True

    def _share(self, account: str, now_s: float) -> TokenBucket:
        limits = self._limits
        share = self._shares.pop(account, None) or TokenBucket(limits.account_per_s, limits.account_at_once, now_s)
        self._shares[account] = share
        if len(self._shares) > MOST_ACCOUNTS:
            self._shares.popitem(last=False)
        return share
