"""Bounds the time that refused tokens cost. Pure.

The signature of a token costs 0.1 to 2 ms of the event loop, and anyone can send tokens with forged ones. So each host
has a budget of time for tokens that turn out to be invalid, and so have all hosts together. A host that has used up its
budget, or all hosts together theirs, can present known tokens only, until some of the budget has grown back.

A valid token costs nothing of the budget: it is known from then on.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass

from trunkline.status import CODE_RESOURCE_EXHAUSTED, OVERLOADED, RequestRefused
from trunkline_router.address import network_of
from trunkline_router.record.token_bucket import TokenBucket

LEAST_RETRY_MS = 100
MOST_HOSTS = 4096  # that are remembered; the shares of all hosts together bound what a forgotten one gets again


@dataclass(frozen=True, slots=True)
class FailureShares:
    """Time for invalid tokens, as shares of one event loop's time, and how much of it may be used at once."""

    of_host: float = 0.01
    in_all: float = 0.04  # leaves room for other hosts while one sends nothing else
    host_burst_s: float = 0.1
    burst_s: float = 0.4


class FailureBudget:
    """The time that is left for invalid tokens, in seconds."""

    def __init__(self, shares: FailureShares = FailureShares()) -> None:
        self._shares = shares
        self._all = TokenBucket(shares.in_all, shares.burst_s)
        self._hosts: OrderedDict[str, TokenBucket] = OrderedDict()

    def check(self, host: str, now_s: float) -> None:
        """Raises RequestRefused (OVERLOADED) if a token of this host must not be verified now."""
        of_host = self._hosts.get(network_of(host))
        wait_s = self._all.wait_s(now_s)
        if of_host is not None:
            wait_s = max(wait_s, of_host.wait_s(now_s))
        if wait_s > 0:
            message = "too many tokens that are not valid came from this client's host, or from all hosts"
            retry_ms = max(LEAST_RETRY_MS, math.ceil(wait_s * 1e3))
            raise RequestRefused(CODE_RESOURCE_EXHAUSTED, OVERLOADED, message, retry_delay_ms=retry_ms)

    def spend(self, host: str, cost_s: float, now_s: float) -> None:
        """Charges the time that an invalid token of this host took. The budget may become negative by one token."""
        shares, name = self._shares, network_of(host)
        self._all.charge(cost_s, now_s)
        of_host = self._hosts.setdefault(name, TokenBucket(shares.of_host, shares.host_burst_s, now_s))
        self._hosts.move_to_end(name)
        of_host.charge(cost_s, now_s)
        if len(self._hosts) > MOST_HOSTS:
            self._hosts.popitem(last=False)
