"""Rate limits that allow bursts, of one and of many. Pure: time is passed in."""

from collections import OrderedDict
from dataclasses import dataclass

MOST_ACCOUNTS = 1024  # that are remembered: those that asked last


class TokenBucket:
    """Begins full. What a token stands for is up to the user: a retry, a byte, a second of CPU time.

    per_s: tokens that come back each second
    burst: the most tokens that it holds
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
    """Bounds how often something is done that clients ask for, so that one of them does not use up what all have."""

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
