"""A real HTTP server in the test's event loop, and clients that send raw bytes."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

from trunkline.status import RequestRefused
from trunkline_router.edge.http.json_body import parse_object, read_body
from trunkline_router.edge.http.limits import HttpLimits
from trunkline_router.edge.http.server import HttpServer
from trunkline_router.record.error_statuses import JSON_TYPE, openai_body, status_of

App = Callable[[Any, Any, Any], Awaitable[None]]
WAIT_S = 60.0  # a promise that takes longer counts as broken
SHORT = HttpLimits(head_s=0.2, body_s=0.2, keep_alive_s=0.2, linger_s=0.2, check_s=0.02)
CHUNKED_END = b"0\r\n\r\n"


async def respond(send: Any, body: bytes, status: int = 200) -> None:
    """A JSON response."""
    headers = [JSON_TYPE, (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the path and the JSON object of the body, if there is a body to read."""
    value = None
    if scope["method"] == "POST":
        try:
            value = await parse_object(await read_body(receive))
        except RequestRefused as refused:
            await respond(send, openai_body(refused), status_of(refused))
            return
    await respond(send, json.dumps([scope["path"], value]).encode())


@asynccontextmanager
async def serving(app: App = echo, **options: Any) -> AsyncIterator[HttpServer]:
    """A server on a free port."""
    server = HttpServer(app, "127.0.0.1", 0, **options)
    await server.start()
    try:
        yield server
    finally:
        await server.stop(0)


class Client:
    """One connection. Reads fail after WAIT_S."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def response(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the next response, chunked or with a length."""
        async with asyncio.timeout(WAIT_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
            first, *lines = head.strip().split("\r\n")
            headers = dict(line.split(": ", 1) for line in lines)
            if headers.get("transfer-encoding") == "chunked":
                body = await self._chunks()
            else:
                body = await self.reader.readexactly(int(headers["content-length"]))
            return int(first.split()[1]), headers, body

    async def _chunks(self) -> bytes:
        body = b""
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            body += await self.reader.readexactly(size)
            await self.reader.readexactly(2)
        await self.reader.readexactly(2)
        return body

    async def line(self) -> bytes:
        async with asyncio.timeout(WAIT_S):
            return await self.reader.readuntil(b"\n")

    async def rest(self) -> bytes:
        """What arrives until the server closes, orderly or by a reset."""
        got = b""
        async with asyncio.timeout(WAIT_S):
            with suppress(ConnectionResetError):
                while more := await self.reader.read(1 << 16):
                    got += more
        return got

    async def close(self) -> None:
        self.writer.close()
        with suppress(ConnectionResetError, BrokenPipeError):
            await self.writer.wait_closed()


@asynccontextmanager
async def connected(server: HttpServer, host: str = "127.0.0.1") -> AsyncIterator[Client]:
    """A connection to the server, from an address of this machine."""
    async with connected_to(server.port, host) as client:
        yield client


@asynccontextmanager
async def connected_to(port: int, host: str = "127.0.0.1") -> AsyncIterator[Client]:
    """A connection to a port of this machine, from one of its addresses."""
    client = Client(*await asyncio.open_connection("127.0.0.1", port, local_addr=(host, 0)))
    try:
        yield client
    finally:
        await client.close()


def get(path: str = "/", *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: localhost", *headers, "", ""]).encode()


def post(body: bytes, *headers: str, path: str = "/") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def error_of(body: bytes) -> dict[str, Any]:
    """The error object of a body in OpenAI's shape."""
    error: dict[str, Any] = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error
