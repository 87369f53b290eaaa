"""What a tenant may use, and the sliding window that counts it. Pure: time is passed in.

A window is exact to a 120th of its length, on the strict side: what was admitted counts for at least the whole window
and at most one bucket longer, so in no minute is more admitted than the quota, and over time at least 99 % of it can
be. A token bucket would let a tenant that was away use almost twice its quota in one minute.
"""

from collections import deque
from dataclasses import dataclass

WINDOW_MS = 60_000
BUCKETS = 120  # of a window; window.lua counts the same

REQUESTS_PER_MINUTE = "requests_per_minute"
TOKENS_PER_MINUTE = "tokens_per_minute"
TOKENS_IN_FLIGHT = "tokens_in_flight"
QUOTA_NAMES = (REQUESTS_PER_MINUTE, TOKENS_PER_MINUTE, TOKENS_IN_FLIGHT)

# Nobody knows when running requests will end.
IN_FLIGHT_RETRY_MS = 1000


@dataclass(frozen=True, slots=True)
class Quotas:
    """A tenant's limits, fleet-wide. None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_in_flight: int | None = None

    def largest_request(self) -> tuple[str, int] | None:
        """The quota that bounds one request's tokens, and by how many; None where none does."""
        limits = {TOKENS_PER_MINUTE: self.tokens_per_minute, TOKENS_IN_FLIGHT: self.tokens_in_flight}
        given = [(limit, name) for name, limit in limits.items() if limit is not None]
        if not given:
            return None
        limit, name = min(given)
        return name, limit


@dataclass(frozen=True, slots=True)
class Used:
    """What counts against a tenant's quotas now."""

    requests: float
    tokens: float
    in_flight: float


@dataclass(frozen=True, slots=True)
class Refusal:
    """A quota is used up."""

    quota: str  # one of QUOTA_NAMES
    retry_ms: int  # when enough of it is expected to be free again


@dataclass(slots=True)
class _Bucket:
    number: int
    requests: int
    tokens: int


class Window:
    """What one tenant was admitted with in the last `window_ms`."""

    def __init__(self, window_ms: int) -> None:
        self.window_ms = window_ms
        self.width_ms = max(1, window_ms // BUCKETS)
        self.requests = 0
        self.tokens = 0
        self._buckets: deque[_Bucket] = deque()  # by number; those without anything are left out

    def __bool__(self) -> bool:
        return bool(self._buckets)

    def bucket(self, now_ms: float) -> int:
        return int(now_ms // self.width_ms)

    def expire(self, now_ms: float) -> None:
        """Forgets what has left the window."""
        oldest = self.bucket(now_ms) - BUCKETS
        while self._buckets and self._buckets[0].number < oldest:
            gone = self._buckets.popleft()
            self.requests -= gone.requests
            self.tokens -= gone.tokens

    def add(self, bucket: int, requests: int, tokens: int) -> None:
        """Counts something in a bucket, which may be an earlier one: what was reserved in it and not used."""
        at = len(self._buckets)
        while at and self._buckets[at - 1].number > bucket:
            at -= 1
        if at and self._buckets[at - 1].number == bucket:
            self._buckets[at - 1].requests += requests
            self._buckets[at - 1].tokens += tokens
        else:
            self._buckets.insert(at, _Bucket(bucket, requests, tokens))
        self.requests += requests
        self.tokens += tokens

    def holds(self, bucket: int, now_ms: float) -> bool:
        """Whether what was counted in a bucket counts still."""
        return bucket >= self.bucket(now_ms) - BUCKETS

    def free_in_ms(self, now_ms: float, *, requests: float, tokens: float) -> int:
        """When so much of what is counted will have left."""
        for bucket in self._buckets:
            requests -= bucket.requests
            tokens -= bucket.tokens
            if requests <= 0 and tokens <= 0:
                return max(1, int((bucket.number + 1) * self.width_ms + self.window_ms - now_ms) + 1)
        return self.window_ms

    def contents(self) -> list[tuple[int, int, int]]:
        """(bucket, requests, tokens) of all that counts."""
        return [(bucket.number, bucket.requests, bucket.tokens) for bucket in self._buckets]


def judge(quotas: Quotas, used: Used, tokens: int, window: Window, now_ms: float) -> Refusal | None:
    """Whether a request that wants so many tokens is within its tenant's quotas; None where it is.

    `window` says when there will be room. It may know less than `used` does.
    """
    rpm, tpm, most = quotas.requests_per_minute, quotas.tokens_per_minute, quotas.tokens_in_flight
    if rpm is not None and used.requests + 1 > rpm:
        over = used.requests + 1 - rpm
        return Refusal(REQUESTS_PER_MINUTE, window.free_in_ms(now_ms, requests=over, tokens=0))
    if tpm is not None and used.tokens + tokens > tpm:
        over = used.tokens + tokens - tpm
        return Refusal(TOKENS_PER_MINUTE, window.free_in_ms(now_ms, requests=0, tokens=over))
    if most is not None and used.in_flight + tokens > most:
        return Refusal(TOKENS_IN_FLIGHT, IN_FLIGHT_RETRY_MS)
    return None
