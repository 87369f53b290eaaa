"""Series of metrics, bounded in number whatever clients choose as labels: every value of a label is a series for ever.

Counters and histograms are filled without locks by one thread.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.samples import Exemplar

OTHER = "other"
MAX_SERIES = 1000  # of a counter
MAX_HISTOGRAMS = 64  # of a histogram; each has as many series as buckets, and two

Bucket = tuple[str, float] | tuple[str, float, Exemplar]
Samples = Iterable[tuple[Sequence[str], float]]  # label values, and a value


class BoundedNames:
    """The first `most` names have labels of their own, and before them `first`, as far as they fit; all later ones
    share one. A counter must not move from one label to another, so a name keeps what it got."""

    def __init__(self, most: int, first: Iterable[str] = ()) -> None:
        self._most = most
        self._names: dict[str, str] = {}
        for name in first:
            self.label(name)

    def label(self, name: str) -> str:
        """The label of a name."""
        label = self._names.get(name)
        if label is None:
            if len(self._names) >= self._most:
                return OTHER
            label = self._names[name] = name
        return label


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


def gauge(name: str, documentation: str, labels: Sequence[str], samples: Samples) -> Metric:
    """A family of values that go up and down."""
    family = GaugeMetricFamily(name, documentation, labels=labels)
    for values, value in samples:
        family.add_metric(values, float(value))
    return family


def counter(name: str, documentation: str, labels: Sequence[str], samples: Samples) -> Metric:
    """A family of values that only grow. Its samples are called name_total."""
    family = CounterMetricFamily(name, documentation, labels=labels)
    for values, value in samples:
        family.add_metric(values, float(value))
    return family


def histogram(
    name: str, documentation: str, labels: Sequence[str], samples: Iterable[tuple[Sequence[str], BucketCounts]]
) -> Metric:
    """A family of histograms."""
    family = HistogramMetricFamily(name, documentation, labels=labels)
    for values, counts in samples:
        family.add_metric(values, counts.cumulative(), counts.sum)
    return family


class SeriesCounts:
    """A counter's values by its labels. Labels beyond the bound count as OTHER, all of them."""

    def __init__(self, name: str, documentation: str, labels: Sequence[str]) -> None:
        self._described = name, documentation, labels
        self._others = (OTHER,) * len(labels)
        self._counts: dict[tuple[str, ...], float] = {}

    def add(self, *labels: str, count: float = 1.0) -> None:
        """Counts under these labels."""
        counts = self._counts
        if labels in counts:
            counts[labels] += count
        elif len(counts) < MAX_SERIES - 1:  # one series is for the others
            counts[labels] = count
        else:
            counts[self._others] = counts.get(self._others, 0.0) + count

    def families(self) -> Iterable[Metric]:
        return [counter(*self._described, self._counts.items())]


class SeriesBuckets:
    """Histograms by their labels, as SeriesCounts."""

    def __init__(
        self, name: str, documentation: str, labels: Sequence[str], bounds: Sequence[float], most: int = MAX_HISTOGRAMS
    ) -> None:
        self._described = name, documentation, labels
        self._others = (OTHER,) * len(labels)
        self._bounds = bounds
        self._most = most - 1
        self._buckets: dict[tuple[str, ...], BucketCounts] = {}

    def of(self, *labels: str) -> BucketCounts:
        """The histogram with these labels."""
        found = self._buckets.get(labels)
        if found is not None:
            return found
        if len(self._buckets) >= self._most:
            labels = self._others
        return self._buckets.setdefault(labels, BucketCounts(self._bounds))

    def families(self) -> Iterable[Metric]:
        return [histogram(*self._described, self._buckets.items())]


class SeriesGroup:
    """Counters and histograms that are filled together: the attributes."""

    def families(self) -> Iterable[Metric]:
        """All families."""
        for series in vars(self).values():
            yield from series.families()
