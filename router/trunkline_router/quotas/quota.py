"""A tenant's quotas and the sliding window that counts its usage. Pure: time is passed in.

A window is exact to a 120th of its length, and errs on the strict side: an admitted request counts for at least the
whole window and at most one bucket longer. So no minute admits more than the quota, and over time at least 99 % of it
can be used. A token bucket would let an idle tenant use almost twice its quota in one minute.
"""

from collections import deque
from dataclasses import dataclass

WINDOW_MS = 60_000
BUCKETS = 120  # per window; window.lua has the same number

REQUESTS_PER_MINUTE = "requests_per_minute"
TOKENS_PER_MINUTE = "tokens_per_minute"
TOKENS_IN_FLIGHT = "tokens_in_flight"
QUOTA_NAMES = (REQUESTS_PER_MINUTE, TOKENS_PER_MINUTE, TOKENS_IN_FLIGHT)
MOST_QUOTA = 10**12  # sums stay exact in every number format on the way

# A guess, because the end of running requests is not known.
IN_FLIGHT_RETRY_MS = 1000


@dataclass(frozen=True, slots=True)
class Quotas:
    """A tenant's fleet-wide limits. None means no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_in_flight: int | None = None

    def within(self, others: "Quotas") -> "Quotas":
        """Returns the lower of both limits for each quota."""
        lower = {}
        for name in QUOTA_NAMES:
            given = [limit for limit in (getattr(self, name), getattr(others, name)) if limit is not None]
            lower[name] = min(given, default=None)
        return Quotas(**lower)

    def that_count(self, tokens: int) -> "Quotas":
        """Returns the limits that a request of so many tokens counts against: without tokens, as a call of Tokenize is,
        the limit of requests alone."""
        return self if tokens else Quotas(requests_per_minute=self.requests_per_minute)

    def largest_request(self) -> tuple[str, int] | None:
        """The name and value of the quota that bounds the tokens of one request, or None if there is none."""
        limits = {TOKENS_PER_MINUTE: self.tokens_per_minute, TOKENS_IN_FLIGHT: self.tokens_in_flight}
        given = [(limit, name) for name, limit in limits.items() if limit is not None]
        if not given:
            return None
        limit, name = min(given)
        return name, limit


UNLIMITED = Quotas()


@dataclass(frozen=True, slots=True)
class Used:
    """What counts against a tenant's quotas now. `in_flight` is in tokens."""

    requests: float
    tokens: float
    in_flight: float

    def against(self, quotas: Quotas) -> list[tuple[str, int, float]]:
        """Each quota that there is: its name, the limit, and what counts against it."""
        used = (self.requests, self.tokens, self.in_flight)
        limits: list[int | None] = [getattr(quotas, name) for name in QUOTA_NAMES]
        rows = zip(QUOTA_NAMES, limits, used, strict=True)
        return [(name, limit, value) for name, limit, value in rows if limit is not None]


@dataclass(frozen=True, slots=True)
class RateLimit:
    """What is left of one of a tenant's limits per minute."""

    of: str  # "requests" or "tokens"
    limit: int
    remaining: int
    reset_ms: int  # until everything that counts now has left the window


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request was refused because a quota is used up."""

    quota: str  # one of QUOTA_NAMES
    retry_ms: int  # time until enough of the quota is expected to be free


@dataclass(slots=True)
class _Bucket:
    number: int
    requests: int
    tokens: int


class Window:
    """The requests and tokens that one tenant was admitted with in the last `window_ms`."""

    def __init__(self, window_ms: int) -> None:
        self.window_ms = window_ms
        self.width_ms = max(1, window_ms // BUCKETS)
        self.requests = 0
        self.tokens = 0
        self._buckets: deque[_Bucket] = deque()  # by number, without empty ones

    def __bool__(self) -> bool:
        return bool(self._buckets)

    def bucket(self, now_ms: float) -> int:
        return int(now_ms // self.width_ms)

    def expire(self, now_ms: float) -> None:
        """Drops the buckets that have left the window."""
        oldest = self.bucket(now_ms) - BUCKETS
        while self._buckets and self._buckets[0].number < oldest:
            gone = self._buckets.popleft()
            self.requests -= gone.requests
            self.tokens -= gone.tokens

    def add(self, bucket: int, requests: int, tokens: int) -> None:
        """Counts requests and tokens in a bucket. Unused reservations are subtracted from the bucket they are in."""
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
        """Whether the bucket is still within the window."""
        return bucket >= self.bucket(now_ms) - BUCKETS

    def free_in_ms(self, now_ms: float, *, requests: float, tokens: float) -> int:
        """Time until at least this many requests and tokens have left the window."""
        for bucket in self._buckets:
            requests -= bucket.requests
            tokens -= bucket.tokens
            if requests <= 0 and tokens <= 0:
                return max(1, int((bucket.number + 1) * self.width_ms + self.window_ms - now_ms) + 1)
        return self.window_ms

    def contents(self) -> list[tuple[int, int, int]]:
        """(bucket number, requests, tokens) of every bucket in the window."""
        return [(bucket.number, bucket.requests, bucket.tokens) for bucket in self._buckets]


def rate_limits(quotas: Quotas, used: Used, window: Window | None, now_ms: float) -> list[RateLimit]:
    """Returns what is left of the limits per minute. The reset time comes from `window`, which may contain less than
    `used`."""
    limits = (
        ("requests", quotas.requests_per_minute, used.requests),
        ("tokens", quotas.tokens_per_minute, used.tokens),
    )
    reset_ms = window.free_in_ms(now_ms, requests=window.requests, tokens=window.tokens) if window else 0
    return [
        RateLimit(of, limit, max(0, int(limit - count)), reset_ms) for of, limit, count in limits if limit is not None
    ]


def judge(quotas: Quotas, used: Used, tokens: int, window: Window, now_ms: float) -> Refusal | None:
    """Returns None if a request for `tokens` is within its tenant's quotas, else the refusal.

    The retry time comes from `window`, which may contain less than `used`.
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
