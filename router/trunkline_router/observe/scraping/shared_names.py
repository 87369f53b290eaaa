"""Names with labels of their own that all processes of a router agree on.

A family's series would otherwise be bounded in each process, but not in the answer that is made of all of them. The
names stand in a file, one a line, which only grows; a process that has read the bound's number of names needs it no
more. Names are tenants, which have no control characters.
"""

import contextlib
import fcntl
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from trunkline_runtime.telemetry.bounded_names import BoundedNames


class SharedNames(BoundedNames):
    """file: may be absent; every process must be given the same `most` and `first`"""

    def __init__(self, file: Path, most: int, first: Iterable[str] = ()) -> None:
        self._file = file
        self._is_ready = False
        super().__init__(most, first)
        self._is_ready = True

    def _may_add(self, name: str) -> bool:
        """Whether the file has the name, or takes it. The lock is not waited for, because its holder may be stopped:
        then the name is not added this time, and what is counted is counted with the others."""
        if not self._is_ready:
            return True
        with contextlib.suppress(OSError), self._open() as file:  # a full disk costs labels only
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.seek(0)
            self._names |= {known: known for known in file.read().split("\n")[:-1]}
            if name in self._names:
                return True
            if len(self._names) >= self._most:
                return False
            file.write(f"{name}\n")
            return True
        return False

    def _open(self) -> IO[str]:
        """In UTF-8 in any locale, and without changes to the ends of lines, which names have none of."""
        return self._file.open("a+", encoding="utf-8", newline="\n")
