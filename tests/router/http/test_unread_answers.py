"""Clients that do not read their answers, or read them slowly, on a server that may be full."""

import asyncio
import socket
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import Any

import pytest
import uvloop

from tests.router.http.http_rig import SHORT, WAIT_S, connected, get, serving
from tests.router.http.unread_pages import PAGE_BYTES, Pages, all_paused, paused, unreading
from trunkline_router.edge.http.wire.connection import Connection
from trunkline_router.edge.http.wire.server import HttpServer

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


async def test_the_client_that_has_read_nothing_for_longest_loses_its_connection_first() -> None:
    async with (
        serving(Pages(PAGE_BYTES), limits=LIMITS, max_connections=3) as server,
        unreading(server, get()) as reads,
        unreading(server, get()) as reads_nothing,
    ):
        connections, begin_s = await all_paused(server, 2), time.monotonic()
        for connection in connections:
            connection.overdue(begin_s)
        with suppress(BlockingIOError):
            while reads.recv(1 << 16):
                pass
        for connection in connections:
            connection.overdue(begin_s + 1.0)
        async with connected(server):
            await dropped(of(reads_nothing, connections), server)
            assert of(reads, connections) in server.connections


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_client_that_reads_what_the_kernel_holds_is_not_dropped(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """The process sees none of it: the event loop has no turn between the looks, so its own buffer stays as it is."""

    async def steady() -> None:
        pages = Pages(PAGE_BYTES)
        async with serving(pages, limits=LIMITS) as server, unreading(server, get()) as client:
            connection, begin_s = await paused(server), time.monotonic()
            waiting = connection.transport.get_write_buffer_size()
            connection.overdue(begin_s)
            with suppress(BlockingIOError):
                while client.recv(1 << 16):
                    pass
            connection.overdue(begin_s + 60.0)
            assert connection.transport.get_write_buffer_size() == waiting
            assert not connection.transport.is_closing()
            connection.overdue(begin_s + 120.0)
            assert connection.transport.is_closing()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(steady())
