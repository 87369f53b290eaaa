"""When a refused call is sent again. Pure: times and randomness are passed in."""

from random import Random

from trunkline.errors import NoWorker, TrunklineError, TryAgain

DEFAULT_RETRIES = 2
FIRST_DELAY_S = 0.2  # after a failed connection: a server that refuses a call names the delay itself
# A longer wait is for the caller to decide on: it knows whether the answer is still of use by then.
MOST_DELAY_S = 30.0
MOST_JITTER = 0.25  # of a delay, added to it: clients that were refused together do not return together


class Tries:
    """The tries of one call.

    retries: how often the call may be sent again
    deadline_s: on the clock of `now_s`; None: there is none
    """

    def __init__(self, retries: int, deadline_s: float | None, rng: Random) -> None:
        self.deadline_s = deadline_s
        self._retries = retries
        self._rng = rng
        self._failed = 0

    def delay_s(self, error: TrunklineError, now_s: float) -> float | None:
        """Records a failed try without output; returns the time to wait before the next one, or None if the error is
        final. The delay is the server's, doubled with each further failure."""
        self._failed += 1
        least_s = _least_delay_s(error)
        if least_s is None or least_s > MOST_DELAY_S or self._failed > self._retries:
            return None
        grown_s = min(MOST_DELAY_S, least_s * 2.0 ** (self._failed - 1))
        delay_s = grown_s * (1.0 + self._rng.uniform(0.0, MOST_JITTER))
        if self.deadline_s is not None and now_s + delay_s >= self.deadline_s:
            return None
        return delay_s


def _least_delay_s(error: TrunklineError) -> float | None:
    """The shortest sensible delay; None if a retry makes no sense."""
    if not isinstance(error, TryAgain):
        return None
    if error.retry_after_s is None and isinstance(error, NoWorker) and not error.reason:
        return FIRST_DELAY_S  # no connection
    return error.retry_after_s
