"""OpenAI completions and chats over HTTP/1.1: a connection per stream, with requests one after another."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

PATH = "/v1/completions"
READ_BYTES = 1 << 16
DONE = b"[DONE]"
LAST_CHUNK = b"0\r"  # of a chunked body; an empty line follows
CONTENT_LENGTH = re.compile(rb"content-length: (\d+)")


class RefusedError(Exception):
    """The server's answer is not the expected one."""


class Connection:
    """A connection that parses as little of the answers as possible, since its own cost is not to be measured."""

    def __init__(self, address: str, path: str = PATH) -> None:
        self._address, self._path = address, path
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def events(self, request: bytes) -> AsyncIterator[bytes]:
        """The data of each event. After the last event the connection is free for the next request.

        Raises RefusedError with the answer if it is not a complete stream of events.
        """
        reader, head = await self._send(request)
        if b"transfer-encoding: chunked" not in head:
            raise RefusedError(head.decode() + (await reader.read(READ_BYTES)).decode())
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

    async def body(self, request: bytes) -> AsyncIterator[bytes]:
        """The body of an answer that is not streamed, once. Raises RefusedError with the answer if it has no length."""
        reader, head = await self._send(request)
        if (length := CONTENT_LENGTH.search(head)) is None:
            raise RefusedError(head.decode())
        yield await reader.readexactly(int(length[1]))

    async def _send(self, request: bytes) -> tuple[asyncio.StreamReader, bytes]:
        """Sends a request. Returns the reader of the answer's body, and the answer's head in lower case. Raises
        RefusedError for another status than 200."""
        if self._streams is None:
            host, _, port = self._address.rpartition(":")
            self._streams = await asyncio.open_connection(host, int(port))
        reader, writer = self._streams
        head = (
            f"POST {self._path} HTTP/1.1\r\nHost: {self._address}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(request)}\r\n\r\n"
        )
        writer.write(head.encode() + request)
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        if not answer.startswith(b"http/1.1 200"):
            raise RefusedError(answer.decode() + (await reader.read(READ_BYTES)).decode())
        return reader, answer

    async def aclose(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            with contextlib.suppress(ConnectionError):
                await self._streams[1].wait_closed()


@asynccontextmanager
async def open_connections(address: str, path: str = PATH) -> AsyncIterator[Callable[[], Connection]]:
    """A function that opens one more connection per call; all are closed at the end."""
    async with AsyncExitStack() as stack:

        def connect() -> Connection:
            connection = Connection(address, path)
            stack.push_async_callback(connection.aclose)
            return connection

        yield connect
