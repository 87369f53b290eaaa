"""A file that another process replaces or rewrites at any time, such as a mounted Secret."""

import asyncio
import hashlib
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

from trunkline_router.access.identity.identity import IdentityError
from trunkline_runtime.log import get_logger
from trunkline_runtime.own_thread import in_own_thread

POLL_S = 0.5  # a revocation counts within 5 s, and looking at a file's times costs microseconds
READ_S = 5.0  # a look at the file that takes longer hangs, as on a mount whose server is gone
MOST_FILE_BYTES = 16 << 20  # some 40,000 API keys
# File systems tell times apart by as much as this. A file that changed more recently may change again without a
# difference in its times, so it is read again.
SETTLED_AFTER_S = 2.0

_Signature = tuple[int, int, int, int, int]


class WatchedFile:
    """A file whose content is handed to `read`, at first and after each change.

    `shown` names it in messages, for example --api-keys=FILE. `read` raises IdentityError if it cannot use the content;
    it runs in a thread. A look at the file that hangs is reported, and neither stops the router nor delays its end.
    """

    def __init__(
        self, shown: str, path: str, read: Callable[[bytes], None], *, now_unix_s: Callable[[], float] = time.time
    ) -> None:
        self._shown = shown
        self._path = Path(path)
        self._read = read
        self._now_unix_s = now_unix_s
        self._signature: _Signature | None = None  # of the content last read; None if that may still change unseen
        self._digest = b""  # of the content last handed to `read`
        self._verdict = ""  # what was wrong with that content
        self._looking: asyncio.Future[str] | None = None
        self._problem = ""  # as logged
        self._log = get_logger()

    async def start(self) -> None:
        """Reads the file. Raises IdentityError, in one line that names the file."""
        problem = await self._look()
        if problem:
            raise IdentityError(f"{self._shown}: {problem}")

    async def run(self) -> None:
        """Follows the file until it is cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            await self.poll()

    async def poll(self) -> None:
        """Looks at the file once. A file that cannot be used changes nothing, and is logged once."""
        problem = await self._look()
        if problem and problem != self._problem:
            self._log.error(
                "a file cannot be used: its last good content stays valid", file=self._shown, problem=problem
            )
        elif self._problem and not problem:
            self._log.info("a file can be used again", file=self._shown)
        self._problem = problem

    async def _look(self) -> str:
        """Returns what is wrong with the file; "" if nothing is. A look that hangs is waited for again, in place of
        another one."""
        if self._looking is None or self._looking.done():
            try:
                self._looking = in_own_thread(self._update, "watched file")
            except RuntimeError:  # at the host's limit of threads; the next look may find one
                return "cannot be read: no thread can be started"
        await asyncio.wait((self._looking,), timeout=READ_S)  # does not cancel what it waits for
        return self._looking.result() if self._looking.done() else f"it cannot be read within {READ_S:g} s"

    def _update(self) -> str:
        """Reads the file if it has changed. Returns what is wrong with it; "" if nothing is."""
        try:
            if self._signature is not None and _signature(os.stat(self._path)) == self._signature:
                return self._verdict
            with open(self._path, "rb", opener=_open_at_once) as file:
                status = os.fstat(file.fileno())  # of what symbolic links lead to now
                if not stat.S_ISREG(status.st_mode):
                    self._signature = None
                    return "is not a regular file"
                content = file.read(MOST_FILE_BYTES + 1)
        except OSError as error:
            self._signature = None
            return error.strerror or type(error).__name__
        is_settled = status.st_mtime + SETTLED_AFTER_S < self._now_unix_s()
        self._signature = _signature(status) if is_settled else None
        digest = hashlib.sha256(content).digest()
        if digest != self._digest:
            self._digest, self._verdict = digest, self._read_new(content)
        return self._verdict

    def _read_new(self, content: bytes) -> str:
        if len(content) > MOST_FILE_BYTES:
            return f"has more than {MOST_FILE_BYTES >> 20} MiB"
        try:
            self._read(content)
        except IdentityError as error:
            return str(error)
        return ""


def _open_at_once(path: str, flags: int) -> int:
    """Does not wait for a writer of a FIFO."""
    return os.open(path, flags | os.O_NONBLOCK)


def _signature(status: os.stat_result) -> _Signature:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
