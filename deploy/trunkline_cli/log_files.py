"""Log files of a local cluster's processes, one each, of bounded size."""

import contextlib
import os
import stat
import tempfile
from pathlib import Path

from trunkline_cli.plan import LaunchError

MOST_BYTES = 16 << 20  # of one file; its predecessor of the same size is kept beside it


def log_folder(cluster: str) -> Path:
    """A folder for a cluster's logs that only this user may write to: in $XDG_STATE_HOME/trunkline (default:
    ~/.local/state/trunkline), or else a new temporary one. Raises LaunchError if neither can be made."""
    state = os.environ.get("XDG_STATE_HOME", "")
    try:
        home = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
        folder = home / "trunkline" / cluster
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_private(folder) and os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # RuntimeError: there is no home directory
        pass
    try:
        return Path(tempfile.mkdtemp(prefix="trunkline-"))
    except OSError as error:
        raise LaunchError(f"there is no place for log files: {error.strerror}") from None


def _is_private(folder: Path) -> bool:
    """Whether no other user could plant files in it."""
    found = folder.lstat()
    is_writable_by_others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not is_writable_by_others


class LogFiles:
    """Appends lines to NAME.log in a folder. A log that is full, or of an earlier run, becomes NAME.log.1."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for earlier in folder.glob("*.log"):
            with contextlib.suppress(OSError):
                _keep_one(earlier)

    def path(self, name: str) -> Path:
        """The file of a process."""
        return self.folder / f"{name}.log"

    def write(self, name: str, line: str) -> None:
        """Drops the line if the disk is full: a process must not fail because of its log."""
        path = self.path(name)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with contextlib.suppress(OSError):
            with open(os.open(path, flags, 0o600), "ab", buffering=0) as file:
                file.write(line.encode(errors="replace") + b"\n")
                is_full = file.tell() >= MOST_BYTES
            if is_full:
                _keep_one(path)


def _keep_one(path: Path) -> None:
    """Renames a log to the name of its predecessor, which is lost."""
    path.replace(path.with_name(f"{path.name}.1"))
