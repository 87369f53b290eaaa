"""Fair service for tenants across the whole fleet. Pure.

Each worker is fair among its own requests. But if a tenant can use only some of another tenant's workers, or its
requests arrive through another router, the fleet as a whole can be unfair. So routers correct the weight that they send
to a worker by the tenant's recent service in the whole fleet, relative to the mean of the competing tenants.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from heapq import nlargest

# Cost units as in the workers' own fair sharing: an output token takes a forward pass of its own, and a token found in
# the prefix cache costs next to nothing.
INPUT_COST, OUTPUT_COST, CACHED_COST = 1.0, 2.0, 0.1

HALF_LIFE_MS = 60_000
LEAST_FACTOR, MOST_FACTOR = 0.25, 4.0
# Exponent that turns a ratio of service into a ratio of weights. Service is an average over a minute, so a steep
# response does not oscillate. With 1, a tenant that can use half the fleet stays at two thirds of its share.
STEEPNESS = 6.0
# Below this mean service, tenants may differ by a single request only, which is not significant.
LEAST_MEAN = 1000.0
MAX_TENANTS = 1024  # counted at once: those with the most service. Up to twice as many before the others are dropped


def decayed(value: float, age_ms: float, half_life_ms: float) -> float:
    """The value after exponential decay for `age_ms`; unchanged for a negative age."""
    return value * math.exp2(-max(0.0, age_ms) / half_life_ms)


def weight_factor(tenant: str, served: Mapping[str, float], competing: Iterable[str]) -> float:
    """The factor for a tenant's weight, from LEAST_FACTOR to MOST_FACTOR. `served`: service divided by weight,
    fleet-wide; `competing`: tenants with open requests at any router."""
    rivals = {name for name in competing if name in served} | {tenant}
    if len(rivals) < 2:
        return 1.0
    mean = sum(served.get(name, 0.0) for name in rivals) / len(rivals)
    if mean < LEAST_MEAN:
        return 1.0
    mine = max(served.get(tenant, 0.0), mean / 100)
    return min(MOST_FACTOR, max(LEAST_FACTOR, math.pow(mean / mine, STEEPNESS)))


class Served:
    """What each tenant was served recently, in cost units divided by its weight: here since the last report, and in the
    fleet as last reported, decayed."""

    def __init__(self) -> None:
        self._new: defaultdict[str, float] = defaultdict(float)
        self._alone_as_of_ms = 0.0
        self.fleet: Mapping[str, float] = {}

    def add(self, tenant: str, amount: float) -> None:
        self._new[tenant] += amount
        if len(self._new) > 2 * MAX_TENANTS:  # the store does not answer, and names come and go
            self._new = defaultdict(float, _largest(self._new))

    def changes(self) -> dict[str, float]:
        """Returns what was served since the last report, and marks it as reported."""
        new, self._new = dict(self._new), defaultdict(float)
        return new

    def count_alone(self, now_ms: float) -> None:
        """Without a store: takes this router's service for the fleet's."""
        age_ms, self._alone_as_of_ms = now_ms - self._alone_as_of_ms, now_ms
        served = {tenant: decayed(amount, age_ms, HALF_LIFE_MS) for tenant, amount in self.fleet.items()}
        for tenant, amount in self.changes().items():
            served[tenant] = served.get(tenant, 0.0) + amount
        self.fleet = _largest({tenant: amount for tenant, amount in served.items() if amount >= 1})


def _largest(amounts: Mapping[str, float]) -> dict[str, float]:
    return dict(nlargest(MAX_TENANTS, amounts.items(), key=lambda item: item[1]))
