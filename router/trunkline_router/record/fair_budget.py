"""Bounds how often something is done that clients can ask for, so that one of them does not use up what all have. Pure:
time is passed in.
"""

from collections import OrderedDict
from dataclasses import dataclass

from trunkline_router.record.token_bucket import TokenBucket

MOST_ACCOUNTS = 1024  # that are remembered
IDLE_S = 60.0  # an account that has not asked for so long is forgotten


@dataclass(frozen=True, slots=True)
class BudgetLimits:
    """Any account may use up the budget down to the reserve. Of the reserve, each account has a small share.

    Accounts that never took of the reserve, or not lately, share what one account may take of it. So invented accounts,
    however many, do not use up the reserve, but a real account that is new waits among them.

    per_s, at_once: of all accounts together
    reserve: the part of `at_once` for accounts that ask little
    account_per_s, account_at_once: what one account takes of the reserve at most. The more accounts ask, the less each
        one takes, so that all of them together leave something of the reserve for the next one
    """

    per_s: float
    at_once: float
    reserve: float
    account_per_s: float
    account_at_once: float

    def share(self, num_accounts: int) -> float:
        """How much of `account_per_s` and `account_at_once` each of so many accounts has: all of them take half of the
        reserve at once, if none asks for more than its share."""
        return min(1.0, self.reserve / max(1.0, 2 * self.account_at_once * num_accounts))


class FairBudget:
    """How often it may be done now."""

    def __init__(self, limits: BudgetLimits, now_s: float) -> None:
        self._limits = limits
        self._all = TokenBucket(limits.per_s, limits.at_once, now_s)
        self._new_accounts = TokenBucket(limits.account_per_s, limits.account_at_once, now_s)
        self._accounts: OrderedDict[str, TokenBucket] = OrderedDict()  # those that took of the reserve, the latest last

    def takes(self, account: str, now_s: float) -> bool:
        """Takes one from the budget for this account, if there is room for it. Otherwise it takes nothing, so that an
        account that asks again and again is not refused for longer than one that waits."""
        left = self._all.left(now_s)
        if left < 1.0 or (left < self._limits.reserve + 1.0 and not self._takes_of_reserve(account, now_s)):
            return False
        self._all.charge(1.0, now_s)
        return True

    def _takes_of_reserve(self, account: str, now_s: float) -> bool:
        limits = self._limits
        if account not in self._accounts and not self._new_accounts.takes(1.0, now_s):
            return False
        own = self._accounts.pop(account, None) or TokenBucket(limits.account_per_s, limits.account_at_once, now_s)
        self._make_room(now_s)
        self._accounts[account] = own
        share = limits.share(len(self._accounts))
        own.per_s = limits.account_per_s * share
        own.burst = min(limits.account_at_once, max(1.0, limits.account_at_once * share))  # less than one is nothing
        return own.takes(1.0, now_s)

    def _make_room(self, now_s: float) -> None:
        """Forgets accounts that are idle, and if there are too many, the one that has not asked for the longest."""
        while self._accounts:
            oldest = next(iter(self._accounts.values()))
            if len(self._accounts) < MOST_ACCOUNTS and oldest.at_s >= now_s - IDLE_S:
                return
            self._accounts.popitem(last=False)
