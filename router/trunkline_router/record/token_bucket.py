"""Rate limits that allow bursts, of one account and of many. Pure: time is passed in."""

from collections import OrderedDict
from dataclasses import dataclass

RESERVE = 0.5  # the part of a budget that is for accounts that ask little
ACCOUNT_SHARE = 0.1  # what one account takes of the reserve, as a part of the whole budget
MOST_ACCOUNTS = 1024  # that are remembered


class TokenBucket:
    """Begins full. What a token stands for is up to the user: a retry, a byte, a second of CPU time.

    per_s: tokens that come back each second
    burst: the most tokens that it holds. Both may be changed; they then apply from `at_s` on
    at_s: the latest time that it was told. Earlier times count as that one, so that a token comes back only once
    """

    __slots__ = ("_left", "at_s", "burst", "per_s")

    def __init__(self, per_s: float, burst: float, now_s: float = 0.0) -> None:
        self.per_s = per_s
        self.burst = self._left = burst
        self.at_s = now_s

    def left(self, now_s: float) -> float:
        """Returns the tokens that are left now. They are negative while more were taken than there were."""
        self.add(max(0.0, now_s - self.at_s) * self.per_s)
        self.at_s = max(self.at_s, now_s)
        return self._left

    def add(self, tokens: float) -> None:
        """Adds tokens beside those that time brings back, as far as there is room for them."""
        self._left = min(self.burst, self._left + tokens)

    def charge(self, tokens: float, now_s: float) -> None:
        """Takes tokens in any case, perhaps more than are left."""
        self._left = self.left(now_s) - tokens

    def takes(self, tokens: float, now_s: float) -> bool:
        """Takes tokens if as many are left. Returns whether it did."""
        if self.left(now_s) < tokens:
            return False
        self._left -= tokens
        return True

    def wait_s(self, now_s: float) -> float:
        """Returns the seconds until something is left; 0 if it is."""
        left = self.left(now_s)
        return 0.0 if left > 0 else -left / self.per_s + 1e-3  # a little longer than until it holds exactly nothing


@dataclass(frozen=True, slots=True)
class BudgetLimits:
    """How often something may be done that clients can ask for, by all accounts together."""

    per_s: float
    at_once: float


class FairBudget:
    """Any account may use up the budget down to the reserve. Of the reserve each account has a share, so that a flood
    of a few accounts leaves something to those that ask little."""

    def __init__(self, limits: BudgetLimits, now_s: float) -> None:
        self._limits = limits
        self._all = TokenBucket(limits.per_s, limits.at_once, now_s)
        self._accounts: OrderedDict[str, TokenBucket] = OrderedDict()  # those that took of the reserve, the latest last

    def takes(self, account: str, now_s: float) -> bool:
        """Takes one from the budget for this account, if there is room for it. Returns whether it did."""
        left = self._all.left(now_s) - 1.0
        if left < 0.0 or (left < RESERVE * self._limits.at_once and not self._of_reserve(account, now_s)):
            return False
        self._all.charge(1.0, now_s)
        return True

    def _of_reserve(self, account: str, now_s: float) -> bool:
        own = self._accounts.pop(account, None)
        if own is None:
            limits = self._limits
            own = TokenBucket(ACCOUNT_SHARE * limits.per_s, max(1.0, ACCOUNT_SHARE * limits.at_once), now_s)
            if len(self._accounts) >= MOST_ACCOUNTS:
                self._accounts.popitem(last=False)
        self._accounts[account] = own
        return own.takes(1.0, now_s)
