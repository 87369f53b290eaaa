"""Limits the rate of retries of requests without output. Pure: time is passed in.

When a worker is lost, all requests that waited there come back at once, and they may be the reason for the loss. A
burst of them is retried at once. Beyond that, retries are limited to a share of new requests, so that they cannot
multiply the load.
"""

from trunkline_router.record.token_bucket import TokenBucket

RETRY_SHARE = 0.2  # retries per new request
LEAST_PER_S = 10.0  # retries per second that are always allowed, so that a router with few requests may retry them all
MOST_AT_ONCE = 1024.0  # burst: as many requests as one worker may have had waiting
MOST_WAIT_S = 5.0  # a retry that would have to wait longer is refused


class RetryBudget:
    """A token bucket that requests and time fill and retries empty. Without tokens, a retry waits or is refused."""

    def __init__(self, now_s: float) -> None:
        self._retries = TokenBucket(LEAST_PER_S, MOST_AT_ONCE, now_s)

    def on_request(self) -> None:
        """Adds RETRY_SHARE of a retry for a new request."""
        self._retries.add(RETRY_SHARE)

    def left(self, now_s: float) -> float:
        """Retries that may be made at once."""
        return max(0.0, self._retries.left(now_s))

    def take(self, now_s: float) -> float | None:
        """Takes one retry. Returns the seconds that it must wait, or None if too many retries are ahead of it."""
        wait_s = max(0.0, (1.0 - self._retries.left(now_s)) / LEAST_PER_S)
        if wait_s > MOST_WAIT_S:
            return None
        self._retries.charge(1.0, now_s)
        return wait_s
