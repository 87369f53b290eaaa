"""When an engine that does not answer its front counts as hung. Pure: time is counted in slices that have passed."""

ENGINE_PATIENCE_S = 5.0  # beyond step_timeout_s, so that the engine's own watchdog acts first and logs where it hangs
IDLE_PATIENCE_S = 30.0  # an idle engine answers in milliseconds; a cancelled request may still be in a step
SLICE_S = 1.0


class Silence:
    """How long an engine has not answered.

    A slice counts with its nominal length, however long it took. So if the whole machine was suspended, the engine
    still has its full time to answer afterwards.

    step_timeout_s: the longest that a step may take; 0: no limit
    """

    def __init__(self, step_timeout_s: float) -> None:
        self._busy_patience_s = step_timeout_s + ENGINE_PATIENCE_S if step_timeout_s else float("inf")
        self.silent_s = 0.0
        self._idle_s = 0.0

    def answered(self) -> None:
        """The engine has answered."""
        self.silent_s = self._idle_s = 0.0

    def is_too_long(self, *, idle: bool) -> bool:
        """Whether the engine counts as hung; called after each slice without an answer.

        idle: the engine had no work in the whole slice
        """
        self.silent_s += SLICE_S
        self._idle_s = self._idle_s + SLICE_S if idle else 0.0
        return self.silent_s >= self._busy_patience_s or self._idle_s >= IDLE_PATIENCE_S
