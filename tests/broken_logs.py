"""Standard errors that cannot be written to, and processes that have them."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

MOST_FILE_BYTES = 1 << 30  # of every file that the process writes
PIPE_BYTES = 4096
# Sets the limit in the process itself: a preexec_fn would fork.
LIMITED = (sys.executable, "-c", f"""
import os, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, ({MOST_FILE_BYTES}, {MOST_FILE_BYTES}))
os.execvp(sys.argv[1], sys.argv[1:])
""")  # fmt: skip


@contextmanager
def full_disk(_: Path) -> Iterator[int]:
    """ENOSPC"""
    descriptor = os.open("/dev/full", os.O_WRONLY)
    yield descriptor
    os.close(descriptor)


@contextmanager
def file_at_its_limit(folder: Path) -> Iterator[int]:
    """EFBIG after a part of a line, for a process that LIMITED starts"""
    descriptor = os.open(folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.truncate(descriptor, MOST_FILE_BYTES - 10)
    yield descriptor
    os.close(descriptor)


@contextmanager
def broken_pipe(_: Path) -> Iterator[int]:
    """EPIPE"""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@contextmanager
def stalled_reader(_: Path) -> Iterator[int]:
    """A pipe that is full after some lines"""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    yield writer
    os.close(writer)
    os.close(reader)


STALLED = "stalled reader"
BROKEN_LOGS: dict[str, Callable[[Path], AbstractContextManager[int]]] = {
    "full disk": full_disk,
    "file at its limit": file_at_its_limit,
    "broken pipe": broken_pipe,
    STALLED: stalled_reader,
}


def start(*command: str, stderr: int, stdout: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*LIMITED, *command], stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True
    )
