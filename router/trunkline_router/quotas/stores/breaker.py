"""A circuit breaker for a store that does not answer. Pure: time is passed in."""

import math
from random import Random

FAILURES_TO_OPEN = 3  # in a row: calls that time out together count as one failure
BACKOFF_FIRST_S, BACKOFF_MOST_S = 0.1, 2.0
STABLE_AFTER_S = 10.0  # a breaker that reopens sooner continues the previous back-off


class Breaker:
    """A circuit breaker that starts open. While closed, calls are made. While open, only background probes are made,
    one after each back-off."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._failures = 0
        self._backoff_s = BACKOFF_FIRST_S
        self._probe_at_s = 0.0
        self._closed_at_s = 0.0
        self._last_late_s = -math.inf
        self.is_open = True
        self.times_opened = 0

    def answered(self) -> None:
        """Records a call that was answered in time."""
        self._failures = 0

    def was_late(self, asked_s: float, now_s: float) -> bool:
        """Records a call that timed out. Returns whether this opened the breaker."""
        if asked_s < self._last_late_s:
            return False
        self._last_late_s = now_s
        self._failures += 1
        return self._failures >= FAILURES_TO_OPEN and self.broke(now_s)

    def broke(self, now_s: float) -> bool:
        """Opens the breaker at once because the connection is lost. Returns False if it was open already."""
        if self.is_open:
            return False
        self.is_open = True
        self.times_opened += 1
        self._failures = 0
        if now_s - self._closed_at_s > STABLE_AFTER_S:
            self._backoff_s = BACKOFF_FIRST_S
        self._wait(now_s)
        return True

    def probe_in_s(self, now_s: float) -> float:
        """Seconds until a probe is due; 0 if it is due now."""
        return max(0.0, self._probe_at_s - now_s)

    def probe_failed(self, now_s: float) -> None:
        """Starts the next back-off, which is twice as long up to BACKOFF_MOST_S."""
        self._wait(now_s)

    def probe_succeeded(self, now_s: float) -> None:
        """Closes the breaker."""
        self.is_open = False
        self._failures = 0
        self._closed_at_s = now_s

    def _wait(self, now_s: float) -> None:
        self._probe_at_s = now_s + self._backoff_s * self._rng.uniform(0.5, 1.0)
        self._backoff_s = min(2 * self._backoff_s, BACKOFF_MOST_S)
