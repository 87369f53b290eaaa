"""Rules for the health of workers: a worker hangs, or starts slowly. Pure: time is passed in."""

from trunkline.v1.worker_pb2 import GetModelResponse, StepCostModel

LONG_STEPS = 3.0  # the time of this many steps of the largest size is added to the timeout
MOST_SILENCE_S = 4000.0  # whatever a worker reports of its steps; the longest batch window is an hour
LEAST_SHARE = 0.1  # of a worker that has just connected


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


def longest_silence_s(model: GetModelResponse, cost: StepCostModel) -> float:
    """Returns how long a healthy worker may be silent: during its largest steps, and while a batch fills."""
    steps_s = LONG_STEPS * (cost.fixed_s + cost.token_s * model.max_step_tokens)
    return min(steps_s + model.batch_window_ms / 1e3, MOST_SILENCE_S)


def slow_start_share(connected_for_s: float, slow_start_s: float) -> float:
    """Returns the part of its full share that a worker takes, from LEAST_SHARE to 1."""
    if connected_for_s >= slow_start_s:
        return 1.0
    return LEAST_SHARE + (1 - LEAST_SHARE) * connected_for_s / slow_start_s
