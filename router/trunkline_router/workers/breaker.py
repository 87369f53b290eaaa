"""A circuit breaker for each worker: one that fails again and again gets no requests for a while. Pure."""

from collections.abc import Callable

from trunkline.status import INTERNAL, NO_WORKER

FAILURES_TO_OPEN = 5  # in a row
OPEN_FIRST_S, OPEN_MOST_S = 1.0, 30.0
SHORT_LIFE_S = 30.0  # a worker that is lost this soon after it connected counts as failing, whatever it answered
STABLE_S = 60.0  # after this time closed, the next opening lasts OPEN_FIRST_S again


class WorkerBreaker:
    """While it is closed, requests go to the worker. While it is open, none does for a time that doubles with each
    opening; then one request at a time is a trial, whose outcome decides. Calls `on_turn` when it opens or closes."""

    def __init__(self, on_turn: Callable[[], None] = lambda: None) -> None:
        self._on_turn = on_turn
        self._failures = 0
        self._openings = 0  # in short succession
        self.times_opened = 0
        self._open_until_s: float | None = None  # None: closed
        self._closed_s = 0.0
        self._trial = False

    def allows(self, now_s: float) -> bool:
        """Whether a request may be sent to the worker now."""
        return self._open_until_s is None or (now_s >= self._open_until_s and not self._trial)

    @property
    def is_closed(self) -> bool:
        return self._open_until_s is None

    def dispatch(self) -> "Trial":
        """Counts a request that is sent to the worker. If the breaker is open, the request is the trial."""
        is_trial = self._open_until_s is not None and not self._trial
        self._trial |= is_trial
        return Trial(self, is_trial)

    def on_success(self, now_s: float, *, is_trial: bool) -> None:
        self._failures = 0
        if is_trial:
            self._trial = False
            self._open_until_s = None
            self._closed_s = now_s
            self._on_turn()

    def on_failure(self, now_s: float, *, is_trial: bool) -> None:
        self._failures += 1
        if is_trial or (self._open_until_s is None and self._failures >= FAILURES_TO_OPEN):
            self._open(now_s)

    def on_no_outcome(self) -> None:
        """A trial ended without saying anything about the worker."""
        self._trial = False

    def on_lost(self, now_s: float, lived_s: float) -> None:
        """The connection was lost after `lived_s`."""
        if lived_s < SHORT_LIFE_S or self._trial:
            self._open(now_s)

    def _open(self, now_s: float) -> None:
        if self._open_until_s is None and now_s - self._closed_s > STABLE_S:
            self._openings = 0
        self._open_until_s = now_s + min(OPEN_FIRST_S * 2**self._openings, OPEN_MOST_S)
        self._openings += 1
        self.times_opened += 1
        self._failures = 0
        self._trial = False
        self._on_turn()


class Trial:
    """One request's verdict on its worker. The first one counts; a request may end without one."""

    def __init__(self, breaker: WorkerBreaker, is_trial: bool) -> None:
        self._breaker = breaker
        self._is_trial = is_trial
        self._is_decided = False

    def succeeded(self, now_s: float) -> None:
        """The request has output."""
        if not self._is_decided:
            self._is_decided = True
            self._breaker.on_success(now_s, is_trial=self._is_trial)

    def refused(self, reason: str, now_s: float) -> None:
        """The worker is connected and ended the request with this reason of the error table."""
        if self._is_decided:
            return
        self._is_decided = True
        if reason in (NO_WORKER, INTERNAL):
            self._breaker.on_failure(now_s, is_trial=self._is_trial)
        else:
            self._breaker.on_success(now_s, is_trial=self._is_trial)

    def end(self) -> None:
        """The request is over, however it ended."""
        if not self._is_decided:
            self._is_decided = True
            if self._is_trial:
                self._breaker.on_no_outcome()
