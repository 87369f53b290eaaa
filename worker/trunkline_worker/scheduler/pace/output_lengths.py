"""How many more tokens a sequence will generate, learned online from sequences that have ended.

The estimate is conditional on what the sequence has generated: the mean and variance of the remaining length of those
that became as long. Conditioning on the past is the idea of LightLLM's past-future scheduler (Gong et al., ASPLOS
2025).
"""

import numpy as np
from numpy.typing import NDArray

# Buckets of lengths grow by a factor of about 1.19, up to 2^20 tokens.
BUCKETS_PER_OCTAVE = 4
OCTAVES = 20
HALF_LIFE = 1024  # in ended sequences: an observation this old counts half
# Prior: this many sequences of exponentially distributed length.
PRIOR_COUNT = 4.0
PRIOR_MEAN_TOKENS = 256.0


class OutputLengths:
    """A decaying histogram of output lengths, and the remaining length for each number of tokens generated so far."""

    def __init__(self) -> None:
        steps = np.arange(BUCKETS_PER_OCTAVE * OCTAVES + 1) / BUCKETS_PER_OCTAVE
        # Bucket i holds lengths in (edges[i-1], edges[i]]; small ones one length each.
        self._edges: NDArray[np.float64] = np.unique(np.ceil(2.0**steps))
        lower = np.concatenate(([0.0], self._edges[:-1]))
        self._middle = (lower + 1 + self._edges) / 2
        self._counts = PRIOR_COUNT * (np.exp(-lower / PRIOR_MEAN_TOKENS) - np.exp(-self._edges / PRIOR_MEAN_TOKENS))
        self._weight = 1.0  # of the next observation: it grows, so that the others need not be scaled down
        self._mean: NDArray[np.float64] = np.empty(0)
        self._variance: NDArray[np.float64] = np.empty(0)
        self._stale = True

    def observe(self, length: int) -> None:
        """Counts a sequence that was not aborted and ended after `length` output tokens."""
        self._weight *= 2 ** (1 / HALF_LIFE)
        index = int(np.searchsorted(self._edges, max(1, length)))
        self._counts[min(index, len(self._counts) - 1)] += self._weight
        if self._weight > 1e9:
            self._counts /= self._weight
            self._weight = 1.0
        self._stale = True

    def remaining(self, generated: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean (at least 1) and variance of the tokens still to come, for each number generated; all arrays [n]."""
        if self._stale:
            self._refresh()
        index = np.minimum(np.searchsorted(self._edges, generated, side="right"), len(self._edges) - 1)
        return np.maximum(self._mean[index] - generated, 1.0), self._variance[index]

    def _refresh(self) -> None:
        """Recomputes the moments of the total length, given that it lies in a bucket or beyond."""

        def tail(values: NDArray[np.float64]) -> NDArray[np.float64]:
            return np.cumsum(values[::-1])[::-1]

        total = tail(self._counts) + 1e-12
        mean = tail(self._counts * self._middle) / total
        square = tail(self._counts * self._middle**2) / total
        self._mean = np.maximum(mean, self._middle)
        self._variance = np.maximum(square - mean**2, 0.0)
        self._stale = False
