"""Clients that do not read their answers, or read them slowly, on a server that may be full."""

import asyncio
import socket
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest

from tests.router.http.http_rig import SHORT, WAIT_S, connected, get, serving
from tests.router.http.unread_pages import PAGE_BYTES, Pages, all_paused, unreading
from trunkline_router.edge.http.connection import Connection
from trunkline_router.edge.http.server import HttpServer

LIMITS = replace(SHORT, head_s=60.0, body_s=60.0, keep_alive_s=60.0, linger_s=60.0, unread_s=60.0, check_s=3600.0)


def of(client: socket.socket, connections: list[Connection]) -> Connection:
    """The server's side of a client's connection."""
    [connection] = [each for each in connections if each.client == client.getsockname()]
    return connection


async def dropped(connection: Connection, server: HttpServer) -> None:
    """Returns once the server has dropped the connection."""
    async with asyncio.timeout(WAIT_S):
        while connection in server.connections:  # noqa: ASYNC110  # accepting has no event
            await asyncio.sleep(0)


@pytest.mark.parametrize("pipelined", [1, 14])
async def test_answers_that_are_not_read_keep_no_other_client_out(pipelined: int) -> None:
    pages, most = Pages(PAGE_BYTES), 8
    async with serving(pages, limits=LIMITS, max_connections=most) as server, AsyncExitStack() as clients:
        for number in range(most):
            host = f"127.0.0.{number % 2 + 1}"
            await clients.enter_async_context(unreading(server, pipelined * get(), host))
        await all_paused(server, most)
        for _ in range(most):
            async with connected(server, "127.0.0.3") as other:
                other.send(get())
                assert len((await other.response())[2]) == PAGE_BYTES
        assert len(server.connections) <= most


async def test_a_connection_whose_client_went_can_be_dropped_for_another_client() -> None:
    stream = Pages(1 << 16, streams=True)
    async with serving(stream, limits=LIMITS, max_connections=2) as server, unreading(server, get()) as client:
        [connection] = await all_paused(server, 1)
        async with connected(server) as other:
            assert await other.rest() == b""  # each host may have one, and that is busy
        client.shutdown(socket.SHUT_WR)
        async with asyncio.timeout(WAIT_S):
            while not stream.ended:  # noqa: ASYNC110  # a handler's end has no event
                await asyncio.sleep(0)
        async with connected(server):
            await dropped(connection, server)


async def test_an_answer_that_is_not_complete_is_never_dropped_for_another_client() -> None:
    complete, stream = Pages(PAGE_BYTES), Pages(1 << 16, streams=True)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await (stream if scope["path"] == "/stream" else complete)(scope, receive, send)

    async with (
        serving(app, limits=LIMITS, max_connections=3) as server,
        unreading(server, get("/stream")) as streaming,
        unreading(server, get()) as idle,
    ):
        connections = await all_paused(server, 2)
        async with connected(server):
            await dropped(of(idle, connections), server)
            assert of(streaming, connections) in server.connections
            assert of(streaming, connections).is_busy()
