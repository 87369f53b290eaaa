"""Distributions of times: counts in logarithmic buckets, since the start and in a recent window."""

import math
from collections import deque

# Bucket i holds values up to LEAST * RATIO^i: a quantile is known within half of 5 %.
LEAST = 1e-6
RATIO = 1.05
NUM_BUCKETS = 460  # up to about 5,600
WINDOW_S = 60.0  # quantiles are of the last one to two of these

_LOG_RATIO = math.log(RATIO)
_LOG_LEAST = math.log(LEAST)


class Histogram:
    """Values in seconds."""

    __slots__ = ("_counts", "_marks", "count", "sum")

    def __init__(self) -> None:
        self._counts = [0] * NUM_BUCKETS
        self._marks: deque[list[int]] = deque([self._counts.copy()], maxlen=2)  # counts at the last windows' ends
        self.count = 0
        self.sum = 0.0

    def add(self, value: float, count: int = 1) -> None:
        """Counts a value, `count` times."""
        self.count += count
        self.sum += value * count
        index = int((math.log(value) - _LOG_LEAST) / _LOG_RATIO) + 1 if value > LEAST else 0
        self._counts[min(index, NUM_BUCKETS - 1)] += count

    def include(self, other: "Histogram") -> None:
        """Adds the values that another histogram has counted since its start."""
        self.count += other.count
        self.sum += other.sum
        self._counts = [mine + theirs for mine, theirs in zip(self._counts, other._counts, strict=True)]

    def turn_window(self) -> None:
        """Ends a window. Called once per WINDOW_S."""
        self._marks.append(self._counts.copy())

    def quantiles(self, *shares: float) -> list[float]:
        """Quantiles in seconds of the values of the last one to two windows, each the middle of its bucket; 0 if there
        were no values."""
        recent = [now - before for now, before in zip(self._counts, self._marks[0], strict=True)]
        total = sum(recent)
        found = []
        for share in shares:
            wanted, seen, index = share * total, 0, 0
            while total and index < NUM_BUCKETS - 1 and seen + recent[index] < wanted:
                seen += recent[index]
                index += 1
            found.append(LEAST * RATIO ** (index - 0.5) if total else 0.0)
        return found
