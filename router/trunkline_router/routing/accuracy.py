"""Tells whether a worker's cache events can be relied on. Pure: time is passed in.

Two things are checked: whether messages arrive while the worker has work, and whether the prompt tokens that the index
promises are found in its cache.
"""

from collections import deque

KEPT_REQUESTS = 200
LEAST_ACCURACY = 0.9
# The index is judged only after this many requests for which it promised tokens.
LEAST_PROMISES = 20
# A worker that computes reports its load twenty times a second, or after each step if steps are longer. If it sends
# nothing for this long, the worker or its stream has stalled.
STALE_AFTER_S = 5.0


class IndexAccuracy:
    """The share of promised prompt tokens that were found cached, over the last requests."""

    def __init__(self) -> None:
        self._kept: deque[tuple[int, int]] = deque(maxlen=KEPT_REQUESTS)  # (promised tokens, those of them found)
        self._promised = self._found = self._promises = 0
        self.promised_so_far = self.found_so_far = 0  # tokens, of all requests

    @property
    def num_requests(self) -> int:
        """Number of requests that it is computed from."""
        return len(self._kept)

    @property
    def share(self) -> float:
        """From 0 to 1; 1 if nothing was promised."""
        return self._found / self._promised if self._promised else 1.0

    @property
    def is_low(self) -> bool:
        """Whether it is too low to rely on. It recovers, because requests count even while the index is not used."""
        return self._promises >= LEAST_PROMISES and self.share < LEAST_ACCURACY

    def add(self, promised_tokens: int, cached_tokens: int) -> None:
        """Adds a request: how much of its prompt was promised, and how much was found in the cache."""
        if len(self._kept) == KEPT_REQUESTS:
            self._count(*self._kept[0], sign=-1)
        self._kept.append((promised_tokens, min(promised_tokens, cached_tokens)))
        promised, found = self._kept[-1]
        self._count(promised, found, sign=1)
        self.promised_so_far += promised
        self.found_so_far += found

    def _count(self, promised: int, found: int, *, sign: int) -> None:
        self._promised += sign * promised
        self._found += sign * found
        self._promises += sign * (promised > 0)


class Freshness:
    """When a worker last sent something, as long as it has work."""

    def __init__(self) -> None:
        self._since_s: float | None = None  # last message, or when an idle worker was given work; None: neither yet

    def heard(self, now_s: float) -> None:
        """A message arrived on the watch stream."""
        self._since_s = now_s

    def expected(self, now_s: float) -> None:
        """Messages are expected from now on: an idle worker was given work."""
        self._since_s = now_s

    def age_s(self, now_s: float, *, has_work: bool) -> float:
        """Time since the last message; 0 if none is expected."""
        return now_s - self._since_s if has_work and self._since_s is not None else 0.0

    def is_stale(self, now_s: float, *, has_work: bool) -> bool:
        """Whether a message is overdue."""
        return self.age_s(now_s, has_work=has_work) > STALE_AFTER_S
