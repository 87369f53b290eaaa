"""When a worker is left alone because requests keep failing there. Pure: the time is told."""

from trunkline.status import INTERNAL, NO_WORKER

FAILURES_TO_OPEN = 5  # in a row
OPEN_FIRST_S, OPEN_MOST_S = 1.0, 30.0
SHORT_LIFE_S = 30.0  # a worker that is lost this soon after it came counts as failing, whatever it answered
STABLE_S = 60.0  # after this time closed, the next opening is short again


class Breaker:
    """Closed: requests go there. Open: none does for a time, that doubles with each opening. Then one request at a time
    is let through as a trial, and its end decides."""

    def __init__(self) -> None:
        self._failures = 0
        self._openings = 0
        self._open_until_s: float | None = None  # None: closed
        self._closed_s = 0.0
        self._trial = False

    def allows(self, now_s: float) -> bool:
        """Whether a request may be sent there now."""
        return self._open_until_s is None or (now_s >= self._open_until_s and not self._trial)

    @property
    def is_closed(self) -> bool:
        return self._open_until_s is None

    def on_dispatch(self) -> None:
        """A request is sent there: the trial, where it is open."""
        if self._open_until_s is not None:
            self._trial = True

    def on_refusal(self, reason: str, now_s: float) -> None:
        """A request there ended with this reason of the error table."""
        if reason in (NO_WORKER, INTERNAL):
            self.on_failure(now_s)
        else:
            self.on_success(now_s)

    def on_success(self, now_s: float) -> None:
        """A request there has output, or was refused for a good reason."""
        self._failures = 0
        if self._open_until_s is not None and self._trial:
            self._open_until_s = None
            self._closed_s = now_s
        self._trial = False

    def on_no_outcome(self) -> None:
        """A request there ended before anything could be said of the worker: cancelled, or past its deadline."""
        self._trial = False

    def on_failure(self, now_s: float) -> None:
        """A request there failed, and it was not the request's fault."""
        self._failures += 1
        if self._trial or (self._open_until_s is None and self._failures >= FAILURES_TO_OPEN):
            self._open(now_s)

    def on_lost(self, now_s: float, lived_s: float) -> None:
        """The connection is gone after this time."""
        if lived_s < SHORT_LIFE_S or self._trial:
            self._open(now_s)

    def _open(self, now_s: float) -> None:
        if self._open_until_s is None and now_s - self._closed_s > STABLE_S:
            self._openings = 0
        self._open_until_s = now_s + min(OPEN_FIRST_S * 2**self._openings, OPEN_MOST_S)
        self._openings += 1
        self._failures = 0
        self._trial = False
