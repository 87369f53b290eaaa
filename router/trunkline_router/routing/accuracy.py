"""How far a worker's cache events can be relied on. Pure: time comes in as a number.

Two things are watched: whether news come while the worker has work, and whether what the index promises of a prompt is
found there.
"""

from collections import deque

KEPT_REQUESTS = 200
LEAST_ACCURACY = 0.9
# Promises that must have been kept or broken before the accuracy says anything.
LEAST_PROMISES = 20
# A worker that computes reports its load twenty times a second, or after each step where those are longer. One that
# says nothing for so long has stalled, or its stream has.
STALE_AFTER_S = 5.0


class IndexAccuracy:
    """Of the prompt tokens that were promised over the last requests, how many were found cached."""

    def __init__(self) -> None:
        self._kept: deque[tuple[int, int]] = deque(maxlen=KEPT_REQUESTS)  # (promised, of these found)
        self._promised = self._found = self._promises = 0

    @property
    def num_requests(self) -> int:
        """How many requests it rests on."""
        return len(self._kept)

    @property
    def share(self) -> float:
        """1 where nothing was promised."""
        return self._found / self._promised if self._promised else 1.0

    @property
    def is_low(self) -> bool:
        """Whether it is too low to count on. What is old falls out of it, whoever is routed by it or not."""
        return self._promises >= LEAST_PROMISES and self.share < LEAST_ACCURACY

    def add(self, promised_tokens: int, cached_tokens: int) -> None:
        """A request of whose prompt this much was promised, and this much was found in the cache."""
        if len(self._kept) == KEPT_REQUESTS:
            self._count(*self._kept[0], sign=-1)
        self._kept.append((promised_tokens, min(promised_tokens, cached_tokens)))
        self._count(*self._kept[-1], sign=1)

    def _count(self, promised: int, found: int, *, sign: int) -> None:
        self._promised += sign * promised
        self._found += sign * found
        self._promises += sign * (promised > 0)


class Freshness:
    """When a worker was last heard of, as long as it has something to tell."""

    def __init__(self) -> None:
        self._since_s: float | None = None  # since when nothing has come; None: nothing was ever expected

    def heard(self, now_s: float) -> None:
        """Something came on the watch stream."""
        self._since_s = now_s

    def expected(self, now_s: float) -> None:
        """From now on something should come: an idle worker was given work."""
        self._since_s = now_s

    def is_stale(self, now_s: float, *, has_work: bool) -> bool:
        """Whether something should have come by now."""
        return has_work and self._since_s is not None and now_s - self._since_s > STALE_AFTER_S
