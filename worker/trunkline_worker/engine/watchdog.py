"""Ends an engine whose step does not: what hangs is started again, and the front tells what it computed."""

import faulthandler

REARM_S = 1.0  # arming starts a thread: no more often than this


class Watchdog:
    """Ends the process, with every thread's traceback on standard error, `timeout_s` to `timeout_s` + REARM_S after it
    was last told that work goes on. A thread that needs no interpreter waits, so nothing that holds it up can stop it.
    0: never. The time is told."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._armed_s: float | None = None

    def goes_on(self, now_s: float) -> None:
        """There is work, and something of it was just done."""
        if self._timeout_s and (self._armed_s is None or now_s - self._armed_s >= REARM_S):
            self._armed_s = now_s
            faulthandler.dump_traceback_later(self._timeout_s + REARM_S, exit=True)

    def rests(self) -> None:
        """There is nothing to do."""
        if self._armed_s is not None:
            self._armed_s = None
            faulthandler.cancel_dump_traceback_later()
