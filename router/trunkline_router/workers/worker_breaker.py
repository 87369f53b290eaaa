"""When a worker is left alone because requests keep failing there. Pure: the time is told."""

from collections.abc import Callable

from trunkline.status import INTERNAL, NO_WORKER

FAILURES_TO_OPEN = 5  # in a row
OPEN_FIRST_S, OPEN_MOST_S = 1.0, 30.0
SHORT_LIFE_S = 30.0  # a worker that is lost this soon after it came counts as failing, whatever it answered
STABLE_S = 60.0  # after this time closed, the next opening is short again


class WorkerBreaker:
    """Closed: requests go there. Open: none does for a time, that doubles with each opening. Then one request at a time
    is let through as a trial, and its end decides. `on_turn` is called when it has opened or closed."""

    def __init__(self, on_turn: Callable[[], None] = lambda: None) -> None:
        self._on_turn = on_turn
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

    def dispatch(self) -> "Trial":
        """A request is sent there: the trial, where it is open."""
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
        """A trial ended before anything could be said of the worker."""
        self._trial = False

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
        self._on_turn()


class Trial:
    """One request's word on the worker that it was sent to: the first one counts, and no word is none."""

    def __init__(self, breaker: WorkerBreaker, is_trial: bool) -> None:
        self._breaker = breaker
        self._is_trial = is_trial
        self._is_decided = False

    def succeeded(self, now_s: float) -> None:
        """It has output."""
        if not self._is_decided:
            self._is_decided = True
            self._breaker.on_success(now_s, is_trial=self._is_trial)

    def refused(self, reason: str, now_s: float) -> None:
        """The worker, which is there, ended it with this reason of the error table."""
        if self._is_decided:
            return
        self._is_decided = True
        if reason in (NO_WORKER, INTERNAL):
            self._breaker.on_failure(now_s, is_trial=self._is_trial)
        else:
            self._breaker.on_success(now_s, is_trial=self._is_trial)

    def end(self) -> None:
        """It is over, one way or another."""
        if not self._is_decided:
            self._is_decided = True
            if self._is_trial:
                self._breaker.on_no_outcome()
