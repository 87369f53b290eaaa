"""Answers of any size, and clients that do not read them."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.router.http.http_rig import WAIT_S
from trunkline_router.edge.http.connection import Connection
from trunkline_router.edge.http.server import HttpServer

PAGE_BYTES = 8 << 20  # more than the kernels take


class Pages:
    """Answers with pages of a fixed size, complete ones or as streams without an end, and counts its answers."""

    def __init__(self, page_bytes: int, *, streams: bool = False) -> None:
        self._page, self._streams = bytes(page_bytes), streams
        self.begun, self.ended, self.headers = 0, 0, [(b"content-type", b"application/octet-stream")]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.begun += 1
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.headers})
            while self._streams:
                await send({"type": "http.response.body", "body": self._page, "more_body": True})
            await send({"type": "http.response.body", "body": self._page})
        finally:
            self.ended += 1


async def all_paused(server: HttpServer, wanted: int) -> list[Connection]:
    """The server's connections, once there are so many and their clients read none of the output that waits."""
    async with asyncio.timeout(WAIT_S):
        while True:
            found = [each for each in server.connections if each.is_writing_paused]
            if len(found) == wanted:
                return found
            await asyncio.sleep(0.01)


async def paused(server: HttpServer) -> Connection:
    """The only such connection."""
    [connection] = await all_paused(server, 1)
    return connection


@asynccontextmanager
async def unreading(server: HttpServer, sent: bytes, host: str = "127.0.0.1") -> AsyncIterator[socket.socket]:
    """A client that has sent something and reads nothing unless it is told to."""
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setblocking(False)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 256 << 10)
        client.bind((host, 0))
        await loop.sock_connect(client, ("127.0.0.1", server.port))
        await loop.sock_sendall(client, sent)
        yield client
