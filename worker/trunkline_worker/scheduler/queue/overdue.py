"""Lanes in which a sequence has waited for so long that others' pace counts less."""

from trunkline_worker.lanes.lanes import Lane
from trunkline_worker.scheduler.queue.waiting import Waiting

# After waiting this many target times, the sequences of a lane may stretch steps: a first token that is later still is
# worse than a slower pace of the others.
OVERDUE_TARGETS = 5.0


class Overdue:
    """Goes by the oldest sequence of a lane, and lets the next one go, whichever it is.

    By the age of the next one alone, a tenant that aborts its requests and sends them again could hold up a lane.
    """

    def __init__(self, waiting: Waiting, itl_target_s: float) -> None:
        self._waiting = waiting
        self._itl_target_s = itl_target_s
        self._patience_s = OVERDUE_TARGETS * itl_target_s

    def is_overdue(self, lane: Lane, now_s: float) -> bool:
        """Whether a sequence of the lane has waited for too long, for whatever reason."""
        oldest_s = self._waiting.oldest_s(lane)
        return oldest_s is not None and now_s >= oldest_s + self._patience_s

    def next_s(self, after_s: float) -> float | None:
        """The first time after `after_s` at which the interactive or standard lane becomes overdue; None: neither does.
        The batch lane never stretches steps."""
        if not self._itl_target_s:
            return None
        oldest_s = [self._waiting.oldest_s(lane) for lane in (Lane.INTERACTIVE, Lane.STANDARD)]
        times_s = [time_s + self._patience_s for time_s in oldest_s if time_s is not None]
        return min([time_s for time_s in times_s if time_s > after_s], default=None)
