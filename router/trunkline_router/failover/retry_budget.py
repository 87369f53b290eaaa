"""How fast requests that no worker has begun to answer may be sent once more. Pure: the time is told.

Where a worker is lost, all that waited there come back at once, and what was lost with it may be lost for a reason.
The first of them go on at once; beyond that, retries are a share of the requests, so that trouble is not multiplied.
"""

RETRY_SHARE = 0.2  # of requests
LEAST_PER_S = 10.0  # a router with few requests may retry them all
MOST_AT_ONCE = 1024.0  # what one worker may have had waiting
MOST_WAIT_S = 5.0  # who would have to wait longer is refused


class RetryBudget:
    """A bucket that requests and time fill, and retries empty. Who finds it empty waits, or is refused."""

    def __init__(self, now_s: float) -> None:
        self._filled = MOST_AT_ONCE
        self._seen_s = now_s

    def on_request(self) -> None:
        """A new request: it pays for a part of a retry."""
        self._filled = min(MOST_AT_ONCE, self._filled + RETRY_SHARE)

    def take(self, now_s: float) -> float | None:
        """One retry: seconds that it has to wait for its turn; None where there are too many before it."""
        self._filled = min(MOST_AT_ONCE, self._filled + (now_s - self._seen_s) * LEAST_PER_S)
        self._seen_s = now_s
        wait_s = max(0.0, (1.0 - self._filled) / LEAST_PER_S)
        if wait_s > MOST_WAIT_S:
            return None
        self._filled -= 1.0
        return wait_s
