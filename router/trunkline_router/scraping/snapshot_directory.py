"""The private directory in which the processes of one router tell each other their metrics.

It is removed when the router ends. A parent that is killed cannot do so: the next router on the machine removes what it
left. The parent holds a lock on its directory, which the kernel frees with the process.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PREFIX = "trunkline-router-"
FORGOTTEN_S = 60.0  # a directory in use changes every few seconds; a younger one may have no lock yet


@contextlib.contextmanager
def snapshot_directory() -> Iterator[Path]:
    """Raises OSError if there is no place for temporary files."""
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as name:
        directory = Path(name)
        with _locked(directory) as is_locked:
            if is_locked:  # without locks, on some file systems, it is unknown what is still in use
                remove_forgotten(directory.parent, time.time())
            yield directory


def remove_forgotten(parent: Path, now_unix_s: float) -> None:
    """Removes the directories of this user's routers that were killed."""
    for directory in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # it is another user's, or another router has removed it just now
            found = directory.lstat()
            if found.st_uid != os.geteuid() or now_unix_s - found.st_mtime < FORGOTTEN_S:
                continue
            with _locked(directory) as is_locked:
                if is_locked:
                    shutil.rmtree(directory)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[bool]:
    """Whether this process now has the directory's lock. Raises OSError if it is no directory."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)
