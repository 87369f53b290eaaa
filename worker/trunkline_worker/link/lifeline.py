"""A process that ends with its parent."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # prctl(2)


def die_with(parent: int) -> None:
    """Makes the kernel kill this process when its parent ends, whatever it is doing (Linux; elsewhere it ends when it
    finds its socket closed).

    parent: its process id, which the caller knew before this process could miss its end
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)
