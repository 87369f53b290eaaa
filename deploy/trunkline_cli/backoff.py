"""Delays before a process that died is started again. Pure: time is passed in."""

from dataclasses import dataclass
from random import Random

FIRST_DELAY_S = 0.5
MOST_DELAY_S = 30.0
HEALTHY_AFTER_S = 60.0  # after a life of this length the delays start again with the first one


@dataclass(slots=True)
class Backoff:
    """A delay that doubles with each death soon after a start; jittered, so that processes do not restart together."""

    rng: Random
    _failures: int = 0

    def after_death(self, lived_s: float) -> float:
        """Records a death; returns the seconds to wait before the next start."""
        self._failures = 1 if lived_s >= HEALTHY_AFTER_S else self._failures + 1
        delay_s = min(MOST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(self._failures - 1, 16))
        return delay_s * self.rng.uniform(0.75, 1.0)
