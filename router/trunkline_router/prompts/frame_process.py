"""The router's handle of a helper process, which answers frames and can be killed at any time."""

import asyncio
import contextlib
import socket
import subprocess
import sys
from typing import Self

from trunkline_router.prompts.frames import HEADER, READY

START_TIMEOUT_S = 30.0


class ProcessEnded(Exception):
    """The process ended instead of answering. `status` is its exit status, negative for a signal."""

    def __init__(self, status: int) -> None:
        super().__init__(f"exit status {status}")
        self.status = status


class FrameProcess:
    """One helper process, which handles one frame at a time."""

    def __init__(
        self, process: subprocess.Popen[bytes], stdout: asyncio.StreamReader, stdin: asyncio.StreamWriter
    ) -> None:
        self._process, self._stdin, self._stdout = process, stdin, stdout

    @classmethod
    async def start(cls, module: str, *arguments: str) -> Self:
        """Starts a process. Raises RuntimeError if it does not become ready."""
        ours, theirs = socket.socketpair()
        # Not asyncio's own subprocess call: uvloop forks, and because of gRPC's threads and fork handlers the child
        # sometimes hangs before exec. Popen uses vfork and takes a millisecond.
        process = subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, "-m", module, *arguments],
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            stderr=subprocess.DEVNULL,  # it may quote clients' text, which must not be logged
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
        """Sends a frame that has no answer."""
        self._stdin.write(HEADER.pack(len(body), kind, name))
        self._stdin.write(body)

    async def ask(self, kind: int, name: bytes, body: bytes | memoryview) -> tuple[int, bytes]:
        """Sends a frame and returns the kind and the body of the answer. Raises ProcessEnded."""
        self.tell(kind, name, body)
        with contextlib.suppress(ConnectionError):  # _read() reports how it ended
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
