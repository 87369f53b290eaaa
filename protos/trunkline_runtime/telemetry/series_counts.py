"""Counters and histograms with labels, whose number of series is bounded, whatever the labels are."""

from collections.abc import ItemsView, Sequence

from trunkline_runtime.telemetry.bounded_names import OTHER
from trunkline_runtime.telemetry.bucket_counts import BucketCounts

MAX_SERIES = 1000  # of a counter
MAX_HISTOGRAMS = 64  # of a histogram; each has as many series as buckets, and two


class SeriesCounts:
    """A counter's values by its labels. Labels beyond the bound count as OTHER, all of them."""

    def __init__(self, num_labels: int, most: int = MAX_SERIES) -> None:
        self._others = (OTHER,) * num_labels
        self._most = most - 1  # one series is for the others
        self._counts: dict[tuple[str, ...], float] = {}

    def add(self, labels: tuple[str, ...], count: float = 1.0) -> None:
        """Counts under these labels."""
        counts = self._counts
        if labels in counts:
            counts[labels] += count
        elif len(counts) < self._most:
            counts[labels] = count
        else:
            counts[self._others] = counts.get(self._others, 0.0) + count

    def items(self) -> ItemsView[tuple[str, ...], float]:
        """Labels and counts."""
        return self._counts.items()


class SeriesBuckets:
    """Histograms by their labels, as SeriesCounts."""

    def __init__(self, num_labels: int, bounds: Sequence[float], most: int = MAX_HISTOGRAMS) -> None:
        self._others = (OTHER,) * num_labels
        self._bounds = bounds
        self._most = most - 1
        self._buckets: dict[tuple[str, ...], BucketCounts] = {}

    def of(self, labels: tuple[str, ...]) -> BucketCounts:
        """The histogram with these labels."""
        found = self._buckets.get(labels)
        if found is not None:
            return found
        if len(self._buckets) >= self._most:
            labels = self._others
        return self._buckets.setdefault(labels, BucketCounts(self._bounds))

    def items(self) -> ItemsView[tuple[str, ...], BucketCounts]:
        """Labels and histograms."""
        return self._buckets.items()
