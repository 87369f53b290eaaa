"""A helper process as the router sees it: it answers frames, and can be ended at any time."""

import asyncio
import contextlib
import socket
import subprocess
import sys
from typing import Self

from trunkline_router.prompts.frames import HEADER, READY

START_TIMEOUT_S = 30.0


class ProcessEnded(Exception):
    """The process went away instead of answering. Its exit status, negative for a signal."""

    def __init__(self, status: int) -> None:
        super().__init__(f"exit status {status}")
        self.status = status


class FrameProcess:
    """One process, for one question at a time."""

    def __init__(
        self, process: subprocess.Popen[bytes], stdout: asyncio.StreamReader, stdin: asyncio.StreamWriter
    ) -> None:
        self._process, self._stdin, self._stdout = process, stdin, stdout

    @classmethod
    async def start(cls, module: str, *arguments: str) -> Self:
        """Raises RuntimeError where the process does not come up."""
        ours, theirs = socket.socketpair()
        # Not the event loop's own way to start a process: uvloop forks, and gRPC's threads and fork handlers make a
        # child that now and then stands still before it becomes the program. This one uses vfork.
        # It takes a millisecond.
        process = subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, "-m", module, *arguments],
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            stderr=subprocess.DEVNULL,  # what it says there may be what a client said, and never stands in a log
            start_new_session=True,
        )
        theirs.close()
        started = cls(process, *await asyncio.open_unix_connection(sock=ours))
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                kind, _ = await started._read()
            assert kind == READY
        except (ProcessEnded, TimeoutError) as error:
            await started.end()
            raise RuntimeError(f"{module} did not start: {error!r}") from None
        except BaseException:
            await started.end()
            raise
        return started

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None and not self._stdout.at_eof()

    def tell(self, kind: int, name: bytes, body: bytes | memoryview) -> None:
        """What the process needs to know for questions that follow."""
        self._stdin.write(HEADER.pack(len(body), kind, name))
        self._stdin.write(body)

    async def ask(self, kind: int, name: bytes, body: bytes | memoryview) -> tuple[int, bytes]:
        """The kind and the body of the answer. Raises ProcessEnded."""
        self.tell(kind, name, body)
        with contextlib.suppress(ConnectionError):  # reading tells how it ended
            await self._stdin.drain()
        return await self._read()

    async def end(self) -> None:
        self._process.kill()
        self._stdin.close()
        await asyncio.to_thread(self._process.wait)

    async def _read(self) -> tuple[int, bytes]:
        try:
            size, kind, _ = HEADER.unpack(await self._stdout.readexactly(HEADER.size))
            return kind, await self._stdout.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            raise ProcessEnded(await asyncio.to_thread(self._process.wait)) from None
