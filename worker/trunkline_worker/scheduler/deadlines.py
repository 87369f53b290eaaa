"""How fast the queue drains, and which requests cannot meet their deadlines any more.

Those are refused at once, because another worker may still be in time. Refused clients are told when to retry.
"""

from collections import deque

from trunkline.status import (
    CODE_DEADLINE_EXCEEDED,
    CODE_RESOURCE_EXHAUSTED,
    DEADLINE_EXCEEDED,
    OVERLOADED,
    RequestRefused,
)
from trunkline_worker.cache.blocks import KVBlocks
from trunkline_worker.cache.sequence import Sequence
from trunkline_worker.scheduler.step_cost import StepCost
from trunkline_worker.scheduler.waiting import Waiting, due_s
from trunkline_worker.step.lanes import LANES, Lane

KEPT_ADMISSIONS = 4096
LEAST_RETRY_S = 0.05
MOST_RETRY_S = 300.0
# Used before any sequence was admitted from a queue: about the time in which a busy worker finishes a short request.
UNKNOWN_RETRY_S = 1.0


class DrainRate:
    """The times of the latest admissions, on a clock that runs only while sequences wait that are ready.

    The retry delay is the time in which as many sequences as wait now were last admitted: a window as long as the time
    it predicts. Sequences that were admitted at once, into a running set with room, are not counted.
    """

    def __init__(self) -> None:
        # For each lane, admissions of that lane and those above it: what drains while a sequence waits in the lane.
        self._admitted_s: list[deque[float]] = [deque(maxlen=KEPT_ADMISSIONS) for _ in LANES]
        self._queued_s = [0.0 for _ in LANES]  # for how long sequences have been waiting, in total
        self._left = [0 for _ in LANES]  # sequences that the last step left waiting
        self._at_s = 0.0

    def step_over(self, ready: list[int], now_s: float) -> None:
        """Called after the last admission of a step.  ready: sequences that could have been admitted, by lane"""
        self._pass_time(now_s)
        left = 0
        for lane in LANES:
            left += ready[lane]
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
        ready = waiting.new_and_ready
        # Its tenant's turn comes as often as its weight allows, however many sequences of other tenants wait.
        ahead = min(
            waiting.num_due_before(sequence.lane, due_s(sequence)),
            sum(ready[: sequence.lane]) + waiting.num_in_turn_before(sequence.account),
        )
        num_waiting = sum(ready[: sequence.lane + 1])
        if not num_waiting:
            return 0.0
        return self.retry_delay_s(sequence.lane, ready, now_s) * ahead / num_waiting

    def _pass_time(self, now_s: float) -> None:
        passed_s = max(0.0, now_s - self._at_s)
        self._at_s = now_s
        if not self._left[-1]:
            return  # nothing waits in any lane
        for level in LANES:
            if self._left[level]:
                self._queued_s[level] += passed_s


class Deadlines:
    """Judges by the first token: how long the output will be is up to the client."""

    def __init__(self, waiting: Waiting, blocks: KVBlocks, cost: StepCost) -> None:
        self._heap = waiting.by_deadline  # by latest start, as of when it was last computed
        self._blocks = blocks
        self._cost = cost

    def out_of_reach(self, sequence: Sequence, wait_s: float, now_s: float) -> bool:
        """Whether a sequence that will wait for `wait_s` cannot have its first token in time."""
        start_by_s = self.start_by_s(sequence)
        if start_by_s is None or now_s + wait_s <= start_by_s:
            return False
        # The cached prefix need not be computed; it is looked up only where it matters.
        self._blocks.match(sequence)
        start_by_s = self.start_by_s(sequence)
        return start_by_s is not None and now_s + wait_s > start_by_s

    def hopeless(self, now_s: float) -> Sequence | None:
        """A waiting sequence that would be too late even if it started now; None if there is none."""
        while (entry := self._heap.first_entry()) is not None and entry[0] < now_s:
            sequence = entry[3]
            if self.out_of_reach(sequence, 0.0, now_s):
                return sequence
            start_by_s = self.start_by_s(sequence)
            assert start_by_s is not None, "only sequences with a deadline are watched"
            self._heap.replace_first(max(start_by_s, now_s))
            if start_by_s <= now_s:
                break
        return None

    def next_s(self) -> float | None:
        """When hopeless() may next find a sequence; None: no waiting sequence has a deadline."""
        entry = self._heap.first_entry()
        return None if entry is None else entry[0]

    def start_by_s(self, sequence: Sequence) -> float | None:
        """The latest time to start a sequence whose uncached tokens are computed in one piece; None: no deadline."""
        if sequence.deadline_s is None:
            return None
        if not self._cost.is_known:
            return sequence.deadline_s
        cached = len(sequence.found) * self._blocks.block_size
        num_left, is_scored = len(sequence.token_ids) - cached, sequence.wants_prompt_logprobs
        chunks_s = self._cost.chunk_s(num_left, cached, is_scored=is_scored)
        return sequence.deadline_s - self._cost.full_fixed_s - chunks_s


def too_late(retry_delay_s: float | None) -> RequestRefused:
    """The error for a late request.  retry_delay_s: None: not even an idle worker would be in time"""
    if retry_delay_s is None:
        return RequestRefused(
            CODE_DEADLINE_EXCEEDED,
            DEADLINE_EXCEEDED,
            "computing the prompt alone takes longer than the deadline leaves",
        )
    return RequestRefused(
        CODE_RESOURCE_EXHAUSTED,
        OVERLOADED,
        "the first token cannot be there before the deadline",
        retry_delay_ms=max(1, round(retry_delay_s * 1e3)),
    )
