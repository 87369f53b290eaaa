"""A rate limit that allows bursts. Pure: time is passed in."""


class TokenBucket:
    """Begins full. What a token stands for is up to the user: a retry, a byte, a second of CPU time.

    per_s: tokens that come back each second
    burst: the most tokens that it holds. Both may be changed; they then apply from `at_s` on
    at_s: the latest time that it was told. Earlier times count as that one, so that a token comes back only once
    """

    __slots__ = ("_left", "at_s", "burst", "per_s")

    def __init__(self, per_s: float, burst: float, now_s: float = 0.0) -> None:
        self.per_s = per_s
        self.burst = self._left = burst
        self.at_s = now_s

    def left(self, now_s: float) -> float:
        """Returns the tokens that are left now. They are negative while more were taken than there were."""
        self.add(max(0.0, now_s - self.at_s) * self.per_s)
        self.at_s = max(self.at_s, now_s)
        return self._left

    def add(self, tokens: float) -> None:
        """Adds tokens beside those that time brings back, as far as there is room for them."""
        self._left = min(self.burst, self._left + tokens)

    def charge(self, tokens: float, now_s: float) -> None:
        """Takes tokens in any case, perhaps more than are left."""
        self._left = self.left(now_s) - tokens

    def takes(self, tokens: float, now_s: float) -> bool:
        """Takes tokens if as many are left. Returns whether it did."""
        if self.left(now_s) < tokens:
            return False
        self._left -= tokens
        return True

    def wait_s(self, now_s: float) -> float:
        """Returns the seconds until something is left; 0 if it is."""
        left = self.left(now_s)
        return 0.0 if left > 0 else -left / self.per_s + 1e-3  # a little longer than until it holds exactly nothing
