"""How fast the queue drains, and when a refused client should retry."""

from collections import deque

from trunkline_worker.cache.sequence import Sequence
from trunkline_worker.lanes.lanes import LANES, Lane
from trunkline_worker.scheduler.queue.waiting import Waiting, due_s

KEPT_ADMISSIONS = 4096
LEAST_RETRY_S = 0.05
MOST_RETRY_S = 300.0
# Used before any sequence was admitted from a queue: about the time in which a busy worker finishes a short request.
UNKNOWN_RETRY_S = 1.0


class DrainRate:
    """The times of the latest admissions, on a clock that runs only while sequences wait.

    The retry delay is the time in which as many sequences as wait now were last admitted: a window as long as the time
    it predicts. Sequences that were admitted at once, into a running set with room, are not counted.
    """

    def __init__(self) -> None:
        # For each lane, admissions of that lane and those above it: what drains while a sequence waits in the lane.
        self._admitted_s: list[deque[float]] = [deque(maxlen=KEPT_ADMISSIONS) for _ in LANES]
        self._queued_s = [0.0 for _ in LANES]  # for how long sequences have been waiting, in total
        self._left = [0 for _ in LANES]  # sequences that the last step left waiting
        self._at_s = 0.0

    def step_over(self, waiting: list[int], now_s: float) -> None:
        """Called after the last admission of a step.  waiting: number of waiting sequences, by lane"""
        self._pass_time(now_s)
        left = 0
        for lane in LANES:
            left += waiting[lane]
            self._left[lane] = left

    def admitted(self, lane: Lane, now_s: float) -> None:
        """A sequence was admitted for the first time."""
        self._pass_time(now_s)
        for level in LANES:
            if level >= lane and self._left[level]:
                self._admitted_s[level].append(self._queued_s[level])

    def is_queueing(self, lane: Lane) -> bool:
        """Whether the last step left sequences of this lane or those above it waiting."""
        return self._left[lane] > 0

    def retry_delay_s(self, lane: Lane, waiting: list[int], now_s: float) -> float:
        """Seconds until the sequences that wait in this lane and those above it will have been admitted.

        waiting: number of waiting sequences, by lane
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
        """Seconds that a sequence submitted now will wait for its admission, judged by the recent rate."""
        if sequence.deadline_s is None or not self.is_queueing(sequence.lane):
            return 0.0
        # Its tenant's turn comes as often as its weight allows, however many sequences of other tenants wait.
        ahead = min(
            waiting.num_due_before(sequence.lane, due_s(sequence)),
            sum(waiting.count[: sequence.lane]) + waiting.num_in_turn_before(sequence.account),
        )
        num_waiting = sum(waiting.count[: sequence.lane + 1])
        if not num_waiting:
            return 0.0
        return self.retry_delay_s(sequence.lane, waiting.count, now_s) * ahead / num_waiting

    def _pass_time(self, now_s: float) -> None:
        passed_s = max(0.0, now_s - self._at_s)
        self._at_s = now_s
        if not self._left[-1]:
            return  # nothing waits in any lane
        for level in LANES:
            if self._left[level]:
                self._queued_s[level] += passed_s
