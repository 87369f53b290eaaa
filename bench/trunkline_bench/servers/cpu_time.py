"""CPU time of other processes."""

import ctypes
import os
import time

_LIBC = ctypes.CDLL(None)


def cpu_s(pid: int) -> float:
    """User and system time of a process since its start, to the nanosecond. Threads that have ended count, child
    processes do not. Raises ProcessLookupError."""
    clock = ctypes.c_int()
    problem = _LIBC.clock_getcpuclockid(pid, ctypes.byref(clock))
    if problem:
        raise ProcessLookupError(problem, os.strerror(problem))
    return time.clock_gettime(clock.value)
