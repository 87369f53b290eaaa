"""When to stop asking a store that does not answer, and when to try it again. Pure: time is passed in."""

import math
from random import Random

FAILURES_TO_OPEN = 3  # one after another: calls that wait at the same time are late together, and prove one thing
BACKOFF_FIRST_S, BACKOFF_MOST_S = 0.1, 2.0
SOUND_AFTER_S = 10.0  # what opens again sooner has not recovered: its backoff goes on growing


class Breaker:
    """Closed: calls are made. Open, as it begins: only a probe in the background is, whenever the backoff is over."""

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
        """A call came back in time."""
        self._failures = 0

    def was_late(self, asked_s: float, now_s: float) -> bool:
        """A call did not come back in time. Whether this opened the breaker."""
        if asked_s < self._last_late_s:
            return False
        self._last_late_s = now_s
        self._failures += 1
        return self._failures >= FAILURES_TO_OPEN and self.broke(now_s)

    def broke(self, now_s: float) -> bool:
        """The connection is gone: no further proof is needed. Whether this opened the breaker."""
        if self.is_open:
            return False
        self.is_open = True
        self.times_opened += 1
        self._failures = 0
        if now_s - self._closed_at_s > SOUND_AFTER_S:
            self._backoff_s = BACKOFF_FIRST_S
        self._wait(now_s)
        return True

    def probe_in_s(self, now_s: float) -> float:
        """How long until a probe is due; 0 where it is."""
        return max(0.0, self._probe_at_s - now_s)

    def probe_failed(self, now_s: float) -> None:
        self._wait(now_s)

    def probe_succeeded(self, now_s: float) -> None:
        self.is_open = False
        self._failures = 0
        self._closed_at_s = now_s

    def _wait(self, now_s: float) -> None:
        self._probe_at_s = now_s + self._backoff_s * self._rng.uniform(0.5, 1.0)
        self._backoff_s = min(2 * self._backoff_s, BACKOFF_MOST_S)
