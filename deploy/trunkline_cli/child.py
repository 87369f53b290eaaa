"""One process of a local cluster: runs a console script, and is stopped together with every process it started."""

import asyncio
import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

KEPT_LINES = 20  # the last ones that a child printed: they are reported when it dies

# Has the kernel send SIGTERM when the launcher dies (Linux prctl(2), PR_SET_PDEATHSIG = 1), then executes the command.
# It is a program and not a preexec_fn: a preexec_fn makes Python fork, and gRPC's fork handlers can keep the child from
# ever reaching exec.
DIE_WITH_PARENT = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the launcher is gone")
os.execvp(sys.argv[2], sys.argv[2:])
"""


def script(name: str) -> str:
    """A console script of this installation: its path beside the interpreter, or its name if PATH must find it."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else name


def print_log_line(name: str, line: str) -> None:
    """Prints a process's line to standard error, with the name of the process."""
    print(f"[{name}] {line}", file=sys.stderr, flush=True)


class Child:
    """A running process. Each line that it prints is handed to `log_line` with its name."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log_line: Callable[[str, str], None]) -> None:
        self.name = name
        self.process = process
        self._log_line = log_line
        self.last_lines: deque[str] = deque(maxlen=KEPT_LINES)
        self.started_s = asyncio.get_running_loop().time()
        self._relaying = asyncio.create_task(self._relay())

    @classmethod
    async def start(
        cls,
        name: str,
        command: Sequence[str],
        environment: dict[str, str] | None = None,
        log_line: Callable[[str, str], None] = print_log_line,
    ) -> "Child":
        """Raises OSError if the command does not exist, or the system cannot start another process."""
        if shutil.which(command[0]) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-S", "-c", DIE_WITH_PARENT, str(os.getpid()), *command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            process_group=0,  # Ctrl-C reaches the launcher alone, which stops its children in order; see EngineLink
            limit=1 << 20,
        )
        return cls(name, process, log_line)

    async def wait(self) -> int:
        """Waits until the process has ended and its output has been relayed; returns the exit status."""
        status = await self.process.wait()
        await asyncio.wait({self._relaying}, timeout=1.0)
        return status

    def ask_to_stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)

    async def end(self, grace_s: float) -> int:
        """Asks the process to stop, and kills its group after `grace_s`; returns the exit status.

        An engine has its own group, and ends with its front (the worker's link/lifeline.py).
        """
        self.ask_to_stop()
        stopped = asyncio.create_task(self.process.wait())
        await asyncio.wait({stopped}, timeout=grace_s)
        self.kill_group()
        return await self.wait()

    def kill_group(self) -> None:
        """Kills what still runs of the process and its group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    async def _relay(self) -> None:
        assert self.process.stdout is not None
        while True:
            try:
                line = await self.process.stdout.readline()
            except ValueError:
                continue  # longer than the limit: the line is dropped
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            self.last_lines.append(text)
            self._log_line(self.name, text)


def describe_status(status: int) -> str:
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
