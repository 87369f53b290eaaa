"""The engine's steps as the front has learned of them: how far apart they were, and what a token cost on the device."""

from bisect import bisect_right

from trunkline.engine.v1.engine_pb2 import StepRecord

TARGET_S = 1.0  # of gaps, where the worker has no target time for steps
MAX_SLOW_STEPS = 8192  # kept at most; half of them are dropped when there are more


class StepTimes:
    """What the timelines of all choices share, so that a token that follows a token of the step before costs none of
    them anything."""

    def __init__(self, itl_target_s: float) -> None:
        self.target_s = itl_target_s or TARGET_S  # longer gaps are noted
        self.done_s = 0.0  # the end of the latest step
        self.latest: StepRecord | None = None
        self.per_token_s = 0.0  # device time of each of its tokens
        # The same, summed over all steps so far: a choice that was decoded in each step since a time has used the
        # difference.
        self.device_s_per_token = 0.0
        # Ends of the steps that ended later after the one before than the target, oldest first, and how much later.
        self._slow: list[tuple[float, float]] = []
        self._num_dropped = 0  # of the oldest

    @property
    def num_slow(self) -> int:
        """Slow steps so far."""
        return self._num_dropped + len(self._slow)

    def take(self, record: StepRecord) -> None:
        """Takes in the step after the latest one."""
        gap_s, self.done_s = record.done_s - self.done_s, record.done_s
        self.latest = record
        if gap_s > self.target_s and record.regular_tokens:
            self._slow.append((record.done_s, gap_s))
            if len(self._slow) > MAX_SLOW_STEPS:
                del self._slow[: MAX_SLOW_STEPS // 2]
                self._num_dropped += MAX_SLOW_STEPS // 2
        self.per_token_s = record.device_s / max(1, record.prefill_tokens + record.decode_tokens)
        self.device_s_per_token += self.per_token_s

    def num_slow_until(self, time_s: float) -> int:
        """Slow steps that ended by then."""
        return self._num_dropped + bisect_right(self._slow, (time_s, float("inf")))

    def slow(self, first: int, end: int) -> list[tuple[float, float]]:
        """Ends and durations of the slow steps with numbers in [first, end), as far as they are kept."""
        return self._slow[max(0, first - self._num_dropped) : max(0, end - self._num_dropped)]
