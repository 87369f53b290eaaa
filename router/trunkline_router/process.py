"""One of several processes of a router; started by processes.py."""

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

from trunkline_router.assembly import SharedPort
from trunkline_router.main import router_settings
from trunkline_router.processes import ONCE_USEFUL
from trunkline_router.serving import run

PR_SET_PDEATHSIG = 1  # prctl(2)


def tell_listening(pipe: int) -> None:
    """Tells the parent that this process listens. A parent that stops has closed its end, and its signal follows."""
    with contextlib.suppress(BrokenPipeError):
        os.write(pipe, b"1")
    os.close(pipe)


def main() -> None:
    parent, listening_fd, when, directory, number, restarts, *arguments = sys.argv[1:]
    die_with(int(parent))
    # It writes to the terminal, but is not in its foreground group. After `stty tostop` that would stop it.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)

    def report_listening() -> None:
        tell_listening(int(listening_fd))

    shared_port = SharedPort(
        report_listening, when == ONCE_USEFUL, directory=Path(directory), number=int(number), restarts=int(restarts)
    )
    sys.exit(run(router_settings(arguments), shared_port))


def die_with(parent: int) -> None:
    """Makes the kernel kill this process when its parent ends (Linux only): otherwise it would keep running."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("trunkline-router: the parent process has ended")


if __name__ == "__main__":
    main()
