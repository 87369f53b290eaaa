"""Streams of OpenAI's completions over HTTP/1.1: one connection each, requests one after the other."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

PATH = "/v1/completions"
READ_BYTES = 1 << 16
DONE = b"[DONE]"
LAST_CHUNK = b"0\r"  # of a chunked body, and an empty line after it


class RefusedError(Exception):
    """An answer that is not a stream of events."""


class Connection:
    """Takes no more of an answer apart than the lines of its events: what it costs is not what is measured."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def events(self, request: bytes) -> AsyncIterator[bytes]:
        """Each event's data. Read to its end, the connection is free for the next request.

        Raises RefusedError with what was answered instead.
        """
        if self._streams is None:
            host, _, port = self._address.rpartition(":")
            self._streams = await asyncio.open_connection(host, int(port))
        reader, writer = self._streams
        head = (
            f"POST {PATH} HTTP/1.1\r\nHost: {self._address}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(request)}\r\n\r\n"
        )
        writer.write(head.encode() + request)
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        if not answer.startswith(b"http/1.1 200") or b"transfer-encoding: chunked" not in answer:
            raise RefusedError(answer.decode() + (await reader.read(READ_BYTES)).decode())
        rest, done, last, ended = b"", False, False, False
        while not ended:
            if not (data := await reader.read(READ_BYTES)):
                raise RefusedError("the connection was closed in the middle of an answer")
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line.startswith(b"data: "):
                    if not (done := line == b"data: " + DONE):
                        yield line[6:]
                elif done:
                    ended = last and line == b"\r"
                    last = line == LAST_CHUNK

    async def aclose(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            with contextlib.suppress(ConnectionError):
                await self._streams[1].wait_closed()


@asynccontextmanager
async def open_connections(address: str) -> AsyncIterator[Callable[[], Connection]]:
    """Each call opens one more; all are closed at the end."""
    async with AsyncExitStack() as stack:

        def connect() -> Connection:
            connection = Connection(address)
            stack.push_async_callback(connection.aclose)
            return connection

        yield connect
