"""Equal service for equal tenants over the whole fleet. Pure.

A worker is fair among the requests that it has. Where a tenant can use only some of the workers that another one uses,
or meets it under another router's credits, each worker can be fair and the fleet not. So the weight that a worker is
told is corrected by what the whole fleet has given a tenant of late, against the mean of those that compete.
"""

import math
from collections.abc import Iterable, Mapping

# Cost units, as the workers' own fair share counts them: an output token takes a pass of its own, a token found in the
# prefix cache next to nothing.
INPUT_COST, OUTPUT_COST, CACHED_COST = 1.0, 2.0, 0.1

HALF_LIFE_MS = 60_000
LEAST_FACTOR, MOST_FACTOR = 0.25, 4.0
# How steeply a difference in service becomes one in weight. Service is an average over a minute, so a steep answer
# does not swing; with 1, a tenant that can use half the fleet stays at two thirds of its share.
STEEPNESS = 6.0
# Below this much service the difference of two tenants is one request, and says nothing.
LEAST_MEAN = 1000.0
MAX_TENANTS = 1024  # that are counted at once, those with the most service


def decayed(value: float, age_ms: float, half_life_ms: float) -> float:
    return value * math.exp2(-max(0.0, age_ms) / half_life_ms)


def weight_factor(tenant: str, served: Mapping[str, float], competing: Iterable[str]) -> float:
    """What to multiply a tenant's weight by. `served`: service over weight, fleet-wide; `competing`: tenants with open
    requests anywhere."""
    rivals = {name for name in competing if name in served} | {tenant}
    if len(rivals) < 2:
        return 1.0
    mean = sum(served.get(name, 0.0) for name in rivals) / len(rivals)
    if mean < LEAST_MEAN:
        return 1.0
    mine = max(served.get(tenant, 0.0), mean / 100)
    return min(MOST_FACTOR, max(LEAST_FACTOR, math.pow(mean / mine, STEEPNESS)))
