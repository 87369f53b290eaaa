"""Log files of a local cluster's processes, one each, of bounded size."""

import contextlib
import os
import tempfile
from pathlib import Path

from trunkline_cli.plan import LaunchError

MOST_BYTES = 16 << 20  # of one file; its predecessor of the same size is kept beside it


def log_folder(cluster: str) -> Path:
    """A folder for a cluster's logs: in $XDG_STATE_HOME/trunkline (default: ~/.local/state/trunkline), or a new
    temporary one where nothing can be written there. Raises LaunchError if neither can be made."""
    state = os.environ.get("XDG_STATE_HOME", "")
    try:
        home = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
        folder = home / "trunkline" / cluster
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # RuntimeError: there is no home directory
        pass
    try:
        return Path(tempfile.mkdtemp(prefix="trunkline-"))
    except OSError as error:
        raise LaunchError(f"there is no place for log files: {error.strerror}") from None


class LogFiles:
    """Appends lines to NAME.log in a folder, whose earlier logs are removed at the start."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for old in (*folder.glob("*.log"), *folder.glob("*.log.1")):
            with contextlib.suppress(OSError):
                old.unlink()

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def write(self, name: str, line: str) -> None:
        """Drops the line if the disk is full: a process must not fail because of its log."""
        path = self.path(name)
        with contextlib.suppress(OSError):
            with path.open("ab", buffering=0) as file:
                file.write(line.encode(errors="replace") + b"\n")
                is_full = file.tell() >= MOST_BYTES
            if is_full:
                path.replace(path.with_name(f"{path.name}.1"))
