"""A budget that grows back. Pure: time is passed in."""


class TokenBucket:
    """At most `burst` at once, and `per_s` in the long run."""

    def __init__(self, per_s: float, burst: float) -> None:
        self._per_s = per_s
        self._burst = burst
        self._left = burst
        self._at_s = 0.0

    def left(self, now_s: float) -> float:
        """Returns what may be taken now. It is negative while more was taken than there was."""
        self._left = min(self._burst, self._left + max(0.0, now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        return self._left

    def take(self, cost: float, now_s: float) -> bool:
        """Takes `cost` if anything is left, and perhaps more than is left. Returns whether it did."""
        if self.left(now_s) <= 0:
            return False
        self._left -= cost
        return True

    def wait_s(self, now_s: float) -> float:
        """Returns the time until something is left; 0 if it is."""
        left = self.left(now_s)
        return 0.0 if left > 0 else -left / self._per_s + 1e-3
