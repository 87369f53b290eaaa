"""A file that another process replaces or rewrites at any time, such as a mounted Secret."""

import asyncio
import os
import stat
from collections.abc import Callable
from pathlib import Path

from trunkline_router.access.identity.identity import IdentityError
from trunkline_runtime.log import get_logger
from trunkline_runtime.own_thread import in_own_thread

POLL_S = 0.5  # a revocation counts within 5 s, and reading the largest file costs a few milliseconds of a thread
READ_S = 5.0  # a look at the file that takes longer hangs, as on a mount whose server is gone
MOST_FILE_BYTES = 16 << 20  # some 40,000 API keys


class WatchedFile:
    """A file whose content is handed to `read`, at first and after each change.

    `shown` names it in messages, for example --api-keys=FILE. `read` raises IdentityError if it cannot use the content;
    it runs in a thread. A look at the file that hangs is reported, and neither stops the router nor delays its end.
    """

    def __init__(self, shown: str, path: str, read: Callable[[bytes], None]) -> None:
        self._shown = shown
        self._path = Path(path)
        self._read = read
        self._content: bytes | None = None  # last handed to `read`
        self._verdict = ""  # what was wrong with it
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
        """Reads the file, and hands its content on if that has changed. Returns what is wrong with it; "" if nothing
        is."""
        try:
            with open(self._path, "rb", opener=_open_at_once) as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    return "is not a regular file"
                content = file.read(MOST_FILE_BYTES + 1)
        except OSError as error:
            return error.strerror or type(error).__name__
        if content != self._content:
            self._content, self._verdict = content, self._read_new(content)
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
