"""How fast the queue drains, and when one who is refused should come back."""

from collections import deque

from trunkline_worker.cache.sequence import Sequence
from trunkline_worker.lanes.lanes import LANES, Lane
from trunkline_worker.queue.waiting import Waiting, due_s

KEPT_ADMISSIONS = 4096
LEAST_RETRY_S = 0.05
MOST_RETRY_S = 300.0
# Before anything was admitted from a queue: about the time in which a busy worker finishes a short request.
UNKNOWN_RETRY_S = 1.0


class DrainRate:
    """The times of the latest admissions, on a clock that runs only while something waits.

    The hint is the time in which as many sequences as wait now were admitted of late: a window that is as long as what
    it foretells. Who is let in at once, into a running set that had room, says nothing about that time.
    """

    def __init__(self) -> None:
        # All of each lane together with those above it: what drains while one waits in that lane.
        self._admitted_s: list[deque[float]] = [deque(maxlen=KEPT_ADMISSIONS) for _ in LANES]
        self._queued_s = [0.0 for _ in LANES]  # how long something has been waiting, in all
        self._left = [0 for _ in LANES]  # what the last step left waiting
        self._at_s = 0.0

    def step_over(self, waiting: list[int], now_s: float) -> None:
        """Called after the last admission of a step.  waiting: sequences that wait, by lane"""
        self._pass_time(now_s)
        left = 0
        for lane in LANES:
            left += waiting[lane]
            self._left[lane] = left

    def admitted(self, lane: Lane, now_s: float) -> None:
        self._pass_time(now_s)
        for level in LANES:
            if level >= lane and self._left[level]:
                self._admitted_s[level].append(self._queued_s[level])

    def is_queueing(self, lane: Lane) -> bool:
        """Whether the last step left anything of this lane or those above it waiting."""
        return self._left[lane] > 0

    def retry_delay_s(self, lane: Lane, waiting: list[int], now_s: float) -> float:
        """When what waits in this lane and those above it will have been admitted.

        waiting: sequences that wait, by lane
        """
        ahead, times_s = sum(waiting[: lane + 1]), self._admitted_s[lane]
        if not ahead:
            return LEAST_RETRY_S
        self._pass_time(now_s)
        if not times_s:
            return UNKNOWN_RETRY_S
        count = min(ahead, len(times_s))
        estimate_s = (self._queued_s[lane] - times_s[-count]) * ahead / count
        return min(max(estimate_s, LEAST_RETRY_S), MOST_RETRY_S)

    def wait_s(self, sequence: Sequence, waiting: Waiting, now_s: float) -> float:
        """How long a sequence that is submitted now will wait for its admission, as far as the rate of late tells."""
        if sequence.deadline_s is None or not self.is_queueing(sequence.lane):
            return 0.0
        # Its tenant's turn comes as often as its weight says, however much of other tenants waits.
        ahead = min(
            waiting.num_due_before(sequence.lane, due_s(sequence)),
            sum(waiting.count[: sequence.lane]) + waiting.num_in_turn_before(sequence.account),
        )
        everyone = sum(waiting.count[: sequence.lane + 1])
        if not everyone:
            return 0.0
        return self.retry_delay_s(sequence.lane, waiting.count, now_s) * ahead / everyone

    def _pass_time(self, now_s: float) -> None:
        passed_s = max(0.0, now_s - self._at_s)
        self._at_s = now_s
        if not self._left[-1]:
            return  # nothing waits in any lane
        for level in LANES:
            if self._left[level]:
                self._queued_s[level] += passed_s
