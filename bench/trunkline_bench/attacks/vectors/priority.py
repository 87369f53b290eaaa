"""Which processes of the benchmark have the cores first."""

import os
from contextlib import suppress
from pathlib import Path

NICE = 10  # a tenth of the weight of a process at 0: it has the cores that its victims leave, and some of the others
AUTOGROUP = Path("/proc/self/autogroup")


def give_way() -> None:
    """This process leaves the cores to others that want them, as one on another machine does.

    Where Linux groups processes by session, `nice` counts within a session alone, and the session's own value counts
    between sessions (sched(7), "The autogroup feature"). The session's value is set only by the process that leads it.
    """
    os.setpriority(os.PRIO_PROCESS, 0, NICE)
    if os.getsid(0) == os.getpid():
        with suppress(FileNotFoundError):  # a kernel that does not group them
            AUTOGROUP.write_text(str(NICE))
