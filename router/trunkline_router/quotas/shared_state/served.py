"""What each tenant was served recently, in cost units divided by its weight: here, and in the fleet as last reported.

Pure: time is passed in.
"""

from collections import defaultdict
from collections.abc import Mapping

from trunkline_router.quotas.fairness import HALF_LIFE_MS, MAX_TENANTS, decayed


class Served:
    """Service by tenant, decayed over time."""

    def __init__(self) -> None:
        self._new: defaultdict[str, float] = defaultdict(float)  # since the last report
        self._own: dict[str, tuple[float, float]] = {}  # (decayed amount, as of), without what is new
        self.fleet: Mapping[str, float] = {}

    def add(self, tenant: str, amount: float) -> None:
        self._new[tenant] += amount

    def changes(self, now_ms: float) -> dict[str, float]:
        """Returns what was served since the last report, and marks it as reported."""
        new = dict(self._new)
        self._new.clear()
        own = {
            tenant: (kept, now_ms)
            for tenant, (amount, as_of_ms) in self._own.items()
            if (kept := decayed(amount, now_ms - as_of_ms, HALF_LIFE_MS)) >= 1
        }
        for tenant, amount in new.items():
            own[tenant] = own.get(tenant, (0.0, now_ms))[0] + amount, now_ms
        if len(own) > 2 * MAX_TENANTS:  # names come and go: the tenants with the most service are kept
            by_amount = sorted(own.items(), key=lambda item: item[1][0], reverse=True)
            own = dict(by_amount[:MAX_TENANTS])
        self._own = own
        return new

    def everything(self, now_ms: float) -> dict[str, float]:
        """Returns all that this router has served, for a store that knows nothing, and marks it as reported."""
        self.changes(now_ms)
        return {tenant: amount for tenant, (amount, _) in self._own.items()}
