"""Rules for the health of workers: a worker hangs, starts slowly, or fails again and again. Pure: time is passed in."""

from collections.abc import Callable

from trunkline.status import INTERNAL, NO_WORKER
from trunkline.v1.worker_pb2 import GetModelResponse, StepCostModel

LONG_STEPS = 3.0  # the time of this many steps of the largest size is added to the timeout
MOST_SILENCE_S = 4000.0  # whatever a worker reports of its steps; the longest batch window is an hour
LEAST_SHARE = 0.1  # of a worker that has just connected
FAILURES_TO_OPEN = 5  # in a row
OPEN_FIRST_S, OPEN_MOST_S = 1.0, 30.0
SHORT_LIFE_S = 30.0  # a worker that is lost this soon after it connected counts as failing, whatever it answered
STABLE_S = 60.0  # after this time closed, the next opening lasts OPEN_FIRST_S again


class Liveness:
    """Detects a hung worker. Every step sends a message: outputs, or a load sample. A worker that has work and sends
    none for `timeout_s` counts as hung, whether its engine, its front or the link to it has stopped.

    Only time in which this router was awake counts: late checks say nothing about the worker.
    """

    def __init__(self, timeout_s: float) -> None:
        self.check_interval_s = min(1.0, timeout_s / 4)
        self.timeout_s = timeout_s
        self._silent_s = 0.0
        self._checked_s: float | None = None
        self._num_messages = 0
        self._had_work = False

    def is_silent(self, now_s: float, *, num_messages: int, has_work: bool, allowance_s: float = 0.0) -> bool:
        """Returns whether the worker has been silent for too long. To be called every check_interval_s.

        num_messages: messages received so far; allowance_s: added to the timeout because the worker's steps are long
        """
        passed_s = 0.0 if self._checked_s is None else now_s - self._checked_s
        self._checked_s = now_s
        had_work, self._had_work = self._had_work, has_work
        if num_messages != self._num_messages or not (has_work and had_work):
            self._num_messages = num_messages
            self._silent_s = 0.0
            return False
        self._silent_s += min(passed_s, 2 * self.check_interval_s)
        return self._silent_s >= self.timeout_s + allowance_s


class Silence:
    """How long one request's worker has sent nothing, for any request. A message between two calls of lasts_s() counts
    as received at the second call, so the silence is never overestimated."""

    def __init__(self, now_s: float, *, num_messages: int) -> None:
        self._since_s = now_s
        self._num_messages = num_messages

    def lasts_s(self, now_s: float, *, num_messages: int) -> float:
        """Returns the length of the silence. `num_messages`: messages received so far."""
        if num_messages != self._num_messages:
            self._num_messages, self._since_s = num_messages, now_s
        return now_s - self._since_s


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


def longest_silence_s(model: GetModelResponse, cost: StepCostModel) -> float:
    """Returns how long a healthy worker may be silent: during its largest steps, and while a batch fills."""
    steps_s = LONG_STEPS * (cost.fixed_s + cost.token_s * model.max_step_tokens)
    return min(steps_s + model.batch_window_ms / 1e3, MOST_SILENCE_S)


def slow_start_share(connected_for_s: float, slow_start_s: float) -> float:
    """Returns the part of its full share that a worker takes, from LEAST_SHARE to 1."""
    if connected_for_s >= slow_start_s:
        return 1.0
    return LEAST_SHARE + (1 - LEAST_SHARE) * connected_for_s / slow_start_s
