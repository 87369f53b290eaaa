"""Dynamic batching, a baseline: a static batch that also forms when its oldest sequence has waited for long enough."""

from trunkline_worker.scheduler.batching.static import StaticBatching
from trunkline_worker.scheduler.queue.waiting import Waiting


class DynamicBatching(StaticBatching):
    """Batches form when `size` sequences wait, or `window_s` after the oldest of them arrived."""

    def __init__(self, waiting: Waiting, size: int, window_s: float) -> None:
        super().__init__(waiting, size)
        self._window_s = window_s

    def opens_s(self) -> float | None:
        if self._expected:
            return None
        return min((s.arrival_s for s in self._waiting), default=0.0) + self._window_s
