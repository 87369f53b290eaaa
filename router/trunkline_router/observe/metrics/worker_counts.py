"""Counts by worker. Workers come and go, and each may be a new name: those that were used last are kept."""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_WORKERS = 1000  # that have series of their own


@dataclass(slots=True)
class OfWorker:
    """Sums over the attempts at one worker."""

    ended: Counter[str] = field(default_factory=Counter)
    first_tokens: int = 0
    first_token_s: float = 0.0
    predicted_s: float = 0.0
    error_s: float = 0.0
    clock_skew_s: float | None = None


class WorkerCounts:
    """The counts of the workers that were used last. A worker that returns after it was forgotten counts from zero,
    which Prometheus takes for a restart."""

    def __init__(self, most: int = MAX_WORKERS) -> None:
        self._most = most
        self._workers: OrderedDict[str, OfWorker] = OrderedDict()

    def of(self, worker: str) -> OfWorker:
        """A worker's counts, to be added to."""
        counts = self._workers.get(worker)
        if counts is None:
            counts = self._workers[worker] = OfWorker()
            if len(self._workers) > self._most:
                self._workers.popitem(last=False)
        self._workers.move_to_end(worker)
        return counts

    def items(self) -> Sequence[tuple[str, OfWorker]]:
        """All counts by worker."""
        return list(self._workers.items())
