"""One process of a local cluster: started by its console script, watched, stopped with all it has started."""

import asyncio
import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path

KEPT_LINES = 20  # of what a child printed last, to report when it dies

# Asks for SIGTERM when the launcher dies (Linux prctl(2), PR_SET_PDEATHSIG = 1), then becomes the command. A program
# and not a preexec_fn: with one Python forks, and gRPC's fork handlers make a child that may never get to exec.
DIE_WITH_PARENT = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the launcher is gone")
os.execvp(sys.argv[2], sys.argv[2:])
"""


def script(name: str) -> str:
    """A console script of this installation: beside the interpreter, else on PATH."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else name


class Child:
    """A running process. Its output goes to our standard error, each line under its name."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.process = process
        self.last_lines: deque[str] = deque(maxlen=KEPT_LINES)
        self.started_s = asyncio.get_running_loop().time()
        self._relaying = asyncio.create_task(self._relay())

    @classmethod
    async def start(cls, name: str, command: Sequence[str], environment: dict[str, str] | None = None) -> "Child":
        """Raises OSError where the command is not there, or the system starts nothing more."""
        if shutil.which(command[0]) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-S", "-c", DIE_WITH_PARENT, str(os.getpid()), *command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,  # a group of its own: Ctrl-C reaches the launcher, which stops children in order
            limit=1 << 20,
        )
        return cls(name, process)

    @property
    def last_line(self) -> str:
        return self.last_lines[-1] if self.last_lines else "it printed nothing"

    async def wait(self) -> int:
        """The exit status, once it has ended and all it printed is relayed."""
        status = await self.process.wait()
        await asyncio.wait({self._relaying}, timeout=1.0)
        return status

    def ask_to_stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)

    async def end(self, grace_s: float) -> int:
        """Asks it to stop, and kills it after `grace_s` if it has not, with all of its group; returns the exit status.

        An engine has a group of its own, and ends with its front (die_with_front in the worker's engine_process.py).
        """
        self.ask_to_stop()
        stopped = asyncio.create_task(self.process.wait())
        await asyncio.wait({stopped}, timeout=grace_s)
        self.kill_group()
        return await self.wait()

    def kill_group(self) -> None:
        """What is left of it and of all that it started in its group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    async def _relay(self) -> None:
        assert self.process.stdout is not None
        while True:
            try:
                line = await self.process.stdout.readline()
            except ValueError:
                continue  # a line longer than the limit: dropped
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            self.last_lines.append(text)
            print(f"[{self.name}] {text}", file=sys.stderr, flush=True)


def describe_status(status: int) -> str:
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
