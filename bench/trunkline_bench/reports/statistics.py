"""Percentiles and fairness of measured values."""

import math
from collections.abc import Iterable


def percentile(values: list[float], share: float) -> float:
    """Nearest-rank percentile; `share` is between 0 and 1. NaN if there are no values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def jain(values: Iterable[float]) -> float:
    """Jain's fairness index: 1 if all values are equal, 1/n if one of n has everything.

    Raises ZeroDivisionError if there are no values."""
    kept = list(values)
    return sum(kept) ** 2 / (len(kept) * sum(value**2 for value in kept))
