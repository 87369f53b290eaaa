"""The attackers' scheduling priority."""

import os
from contextlib import suppress
from pathlib import Path

NICE = 10  # a tenth of the weight of a process at 0, so that victims get most of the time on the cores
AUTOGROUP = Path("/proc/self/autogroup")


def give_way() -> None:
    """Lowers the priority of this process, so that it hardly slows others, as if it ran on another machine.

    If Linux groups processes by session, `nice` only counts within a session, and the session's own nice value counts
    between sessions (sched(7), "The autogroup feature"). Only the session leader sets the session's value here.
    """
    os.setpriority(os.PRIO_PROCESS, 0, NICE)
    if os.getsid(0) == os.getpid():
        with suppress(FileNotFoundError):  # a kernel without autogroups
            AUTOGROUP.write_text(str(NICE))
