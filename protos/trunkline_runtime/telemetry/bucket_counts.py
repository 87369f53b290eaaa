"""Histograms of metrics: counts in fixed buckets, filled without locks by one thread."""

from bisect import bisect_left
from collections.abc import Sequence


class BucketCounts:
    """Counts values by upper bounds, as Prometheus does: a value that equals a bound is in its bucket."""

    __slots__ = ("_counts", "_names", "bounds", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.sum = 0.0
        self._counts = [0] * (len(bounds) + 1)
        self._names = [*(str(float(bound)) for bound in bounds), "+Inf"]

    def add(self, value: float, count: int = 1) -> None:
        """Counts a value, `count` times."""
        self._counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    @property
    def count(self) -> int:
        return sum(self._counts)

    def cumulative(self) -> list[tuple[str, float]]:
        """Each bound with the number of values up to it, as prometheus_client takes it."""
        made, total = [], 0
        for name, count in zip(self._names, self._counts, strict=True):
            total += count
            made.append((name, float(total)))
        return made


def one_two_five(most: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, … up to `most`: the bounds of vLLM's histograms of tokens."""
    bounds = [digit * 10**power for power in range(len(str(most))) for digit in (1, 2, 5)]
    return tuple(float(bound) for bound in bounds if bound <= most)
