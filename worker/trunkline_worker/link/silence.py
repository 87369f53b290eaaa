"""When an engine that owes its front an answer counts as hung. Pure: time comes in as slices that have passed."""

ENGINE_PATIENCE_S = 5.0  # beyond step_timeout_s, for the engine's own watchdog to act first, which tells where it hangs
IDLE_PATIENCE_S = 30.0  # an engine without work answers in milliseconds; what was cancelled may still be in its step
SLICE_S = 1.0


class Silence:
    """How long an engine has owed an answer.

    A slice counts with its own length, however long the machine took for it. So after a time in which the whole machine
    stood still, the engine has as long as ever to answer.

    step_timeout_s: the longest that a step may take; 0: any time
    """

    def __init__(self, step_timeout_s: float) -> None:
        self._busy_patience_s = step_timeout_s + ENGINE_PATIENCE_S if step_timeout_s else float("inf")
        self.silent_s = 0.0
        self._idle_s = 0.0

    def answered(self) -> None:
        """It has answered."""
        self.silent_s = self._idle_s = 0.0

    def is_too_long(self, *, idle: bool) -> bool:
        """To be asked after each slice without an answer.  idle: nobody has waited for the engine in all of it"""
        self.silent_s += SLICE_S
        self._idle_s = self._idle_s + SLICE_S if idle else 0.0
        return self.silent_s >= self._busy_patience_s or self._idle_s >= IDLE_PATIENCE_S
