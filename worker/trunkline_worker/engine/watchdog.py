"""Ends an engine whose step hangs; the front then reports the sequences that the step computed."""

import faulthandler

REARM_S = 1.0  # arming starts a thread: no more often than this


class Watchdog:
    """Ends the process, with every thread's traceback on standard error, `timeout_s` to `timeout_s` + REARM_S after the
    last goes_on(). A thread outside the interpreter waits, so a thread that holds the interpreter lock cannot stop it.
    A timeout of 0 disables it."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._armed_s: float | None = None

    def goes_on(self, now_s: float) -> None:
        """There is work, and it has just advanced."""
        if self._timeout_s and (self._armed_s is None or now_s - self._armed_s >= REARM_S):
            self._armed_s = now_s
            faulthandler.dump_traceback_later(self._timeout_s + REARM_S, exit=True)

    def rests(self) -> None:
        """There is no work until the next goes_on()."""
        if self._armed_s is not None:
            self._armed_s = None
            faulthandler.cancel_dump_traceback_later()
