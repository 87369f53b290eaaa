"""Bounds how many requests are exported, because clients decide about it. Pure: time is passed in.

A client that sets the flag of its trace, or whose requests fail by its own doing, makes the router export each of its
requests. To make and encode the spans of one takes 0.2 to 0.4 ms of the interpreter, and they take places in the queue
before the exporter. So the requests that are exported have a rate. Any tenant may use it up to a reserve, of which each
tenant has a small share: so a tenant that floods the router costs the others none of their traces.
"""

from collections import OrderedDict
from dataclasses import dataclass

PER_S = 100.0  # requests that one process exports: a few hundredths of its time
AT_ONCE = 400.0
RESERVE = 200.0  # of those at once: for tenants that export little
TENANT_PER_S = 20.0  # requests that one tenant takes of the reserve
TENANT_AT_ONCE = 40.0
MOST_TENANTS = 1024  # that are remembered


class TraceBudget:
    """How many requests may be exported now."""

    def __init__(self, now_s: float) -> None:
        self._all = _Bucket(AT_ONCE, now_s)
        self._tenants: OrderedDict[str, _Bucket] = OrderedDict()  # those that took of the reserve, the latest last

    def takes(self, tenant: str, now_s: float) -> bool:
        """Takes a request of this tenant from the budget, if there is room for it."""
        left = self._all.refill(PER_S, AT_ONCE, now_s)
        if left < 1.0:
            return False
        if left <= RESERVE and not self._takes_of_reserve(tenant, now_s):
            return False
        self._all.left -= 1.0
        return True

    def _takes_of_reserve(self, tenant: str, now_s: float) -> bool:
        of_tenant = self._tenants.setdefault(tenant, _Bucket(TENANT_AT_ONCE, now_s))
        self._tenants.move_to_end(tenant)
        if len(self._tenants) > MOST_TENANTS:
            self._tenants.popitem(last=False)
        if of_tenant.refill(TENANT_PER_S, TENANT_AT_ONCE, now_s) < 1.0:
            return False
        of_tenant.left -= 1.0
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
