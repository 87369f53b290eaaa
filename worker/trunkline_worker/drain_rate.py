"""How fast the queue drains, and when one who is refused should come back."""

from collections import deque

from trunkline_worker.lanes import Lane

KEPT_ADMISSIONS = 4096
LEAST_RETRY_S = 0.05
MOST_RETRY_S = 300.0
# Before anything was admitted: about the time in which a busy worker finishes a short request.
UNKNOWN_RETRY_S = 1.0


class DrainRate:
    """The times of the latest admissions.

    The hint is the time in which as many sequences as wait now were admitted of late: a window that is as long as what
    it foretells.
    """

    def __init__(self) -> None:
        # Of each lane together with those above it: what drains while one waits in that lane.
        self._admitted_s: list[deque[float]] = [deque(maxlen=KEPT_ADMISSIONS) for _ in Lane]

    def admitted(self, lane: Lane, now_s: float) -> None:
        for times_s in self._admitted_s[lane:]:
            times_s.append(now_s)

    def retry_delay_s(self, lane: Lane, waiting: list[int], now_s: float) -> float:
        """When what waits in this lane and those above it will have been admitted.

        waiting: sequences that wait, by lane
        """
        ahead, times_s = sum(waiting[: lane + 1]), self._admitted_s[lane]
        if not ahead:
            return LEAST_RETRY_S
        if not times_s:
            return UNKNOWN_RETRY_S
        count = min(ahead, len(times_s))
        estimate_s = (now_s - times_s[-count]) * ahead / count
        return min(max(estimate_s, LEAST_RETRY_S), MOST_RETRY_S)
