"""The private directory in which the processes of one router tell each other their metrics.

It is removed when the router ends. A parent that is killed cannot do so: the next router on the machine removes what it
left. The parent holds a lock on its directory, which the kernel frees with the process. The directory has its name only
once it is locked, so a directory with such a name and without a lock is not in use.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "trunkline-router-"


@contextlib.contextmanager
def snapshot_directory() -> Iterator[Path]:
    """Raises OSError if there is no place for temporary files."""
    made = Path(tempfile.mkdtemp(prefix=f".{PREFIX}"))
    with _locked(made) as is_locked:
        directory = made.rename(made.with_name(made.name.removeprefix(".")))
        try:
            if is_locked:  # without locks, on some file systems, it is unknown what is still in use
                remove_forgotten(directory.parent)
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def remove_forgotten(parent: Path) -> None:
    """Removes the directories of this user's routers that were killed."""
    for directory in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # it is another user's, or another router has removed it just now
            if directory.lstat().st_uid != os.geteuid():
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
