"""Histograms of metrics: counts in fixed buckets, filled without locks by one thread."""

from bisect import bisect_left
from collections.abc import Sequence

from prometheus_client.samples import Exemplar

Bucket = tuple[str, float] | tuple[str, float, Exemplar]


class BucketCounts:
    """Counts values by upper bounds, as Prometheus does: a value that equals a bound is in its bucket."""

    __slots__ = ("_counts", "_exemplars", "_names", "bounds", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.sum = 0.0
        self._counts = [0] * (len(bounds) + 1)
        self._names = [*(str(float(bound)) for bound in bounds), "+Inf"]
        self._exemplars: dict[int, tuple[int, float, float]] = {}  # by bucket: trace id, value, Unix time

    def add(self, value: float, count: int = 1) -> None:
        """Counts a value, `count` times."""
        self._counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    def add_traced(self, value: float, trace_id: int, unix_s: float) -> None:
        """Counts a value, and keeps its trace as the example of its bucket. trace_id: 0: it has none"""
        bucket = bisect_left(self.bounds, value)
        self._counts[bucket] += 1
        self.sum += value
        if trace_id:
            self._exemplars[bucket] = (trace_id, value, unix_s)

    @property
    def count(self) -> int:
        return sum(self._counts)

    def cumulative(self) -> list[Bucket]:
        """Each bound with the number of values up to it and, where there is one, an example, as prometheus_client takes
        it."""
        made: list[Bucket] = []
        total = 0
        for number, (name, count) in enumerate(zip(self._names, self._counts, strict=True)):
            total += count
            kept = self._exemplars.get(number)
            made.append((name, float(total)) if kept is None else (name, float(total), _exemplar(*kept)))
        return made


def _exemplar(trace_id: int, value: float, unix_s: float) -> Exemplar:
    return Exemplar({"trace_id": f"{trace_id:032x}"}, value, unix_s)


def one_two_five(most: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, … up to `most`: the bounds of vLLM's histograms of tokens."""
    bounds = [digit * 10**power for power in range(len(str(most))) for digit in (1, 2, 5)]
    return tuple(float(bound) for bound in bounds if bound <= most)
