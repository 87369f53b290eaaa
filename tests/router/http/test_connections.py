"""How many connections the server takes, and how it starts and stops."""

import asyncio
import gc
import socket
import weakref
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tests.router.http.http_rig import WAIT_S, Client, connected, echo, get, post, respond, serving
from trunkline_router.edge.http.json_body import read_body
from trunkline_router.edge.http.server import HttpServer
from trunkline_runtime.server import PortInUse, hold_port


async def test_one_host_leaves_room_for_others() -> None:
    async with serving(max_connections=16) as server, AsyncExitStack() as opened:
        many = [await opened.enter_async_context(connected(server, "127.0.0.1")) for _ in range(20)]
        for client in many[:6]:
            assert await client.rest() == b""  # the longest idle ones: a host has seven eighths
        for host in ("127.0.0.2", "127.0.0.3", "127.0.0.4"):
            other = await opened.enter_async_context(connected(server, host))
            other.send(get())
            assert (await other.response())[0] == 200
        assert await many[6].rest() == b""  # the largest host makes room
        many[7].send(get())
        assert (await many[7].response())[0] == 200
        assert server.num_connections == 16


async def test_the_longest_idle_connection_is_dropped() -> None:
    async with serving(max_connections=3) as server, connected(server) as first, connected(server) as second:
        for client in (first, second, first):
            client.send(get())
            assert (await client.response())[0] == 200
        async with connected(server):
            assert await second.rest() == b""
            first.send(get())
            assert (await first.response())[0] == 200


async def test_connections_that_wait_for_answers_are_never_dropped() -> None:
    running, finish = asyncio.Semaphore(0), asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        running.release()
        await finish.wait()
        await echo(scope, receive, send)

    async with serving(slow, max_connections=4) as server, AsyncExitStack() as opened:
        busy = [await opened.enter_async_context(connected(server)) for _ in range(3)]
        for client in busy:
            client.send(get())
            await running.acquire()
        async with connected(server) as other:
            assert await other.rest() == b""
        async with connected(server, "127.0.0.2") as idle, connected(server, "127.0.0.3") as newer:
            assert await idle.rest() == b""  # it is behind busy ones, and makes room
            newer.send(get())
            await running.acquire()
            finish.set()
            for client in (*busy, newer):
                assert (await client.response())[0] == 200


async def test_a_closed_connection_leaves_nothing_for_the_garbage_collector() -> None:
    async with serving() as server:
        async with connected(server) as client:
            client.send(get())
            await client.response()
            [known] = map(weakref.ref, server.connections)
        gc.disable()
        try:
            await asyncio.wait_for(server.all_closed(), WAIT_S)
            for _ in range(3):  # what is scheduled refers to it
                await asyncio.sleep(0)
            assert known() is None
        finally:
            gc.enable()


async def test_a_connection_whose_response_is_complete_can_be_dropped_again() -> None:
    finish = asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await finish.wait()
        await echo(scope, receive, send)

    async with serving(slow, max_connections=2) as server, connected(server) as client:
        client.send(get())
        async with connected(server) as other:
            assert await other.rest() == b""  # each host may have one, and that is busy
        finish.set()
        assert (await client.response())[0] == 200
        async with connected(server) as other:
            other.send(get())
            assert (await other.response())[0] == 200
        assert await client.rest() == b""


async def test_many_idle_connections_do_not_keep_a_request_out() -> None:
    async with serving(max_connections=8) as server:
        idle = [Client(*await asyncio.open_connection("127.0.0.1", server.port)) for _ in range(50)]
        async with connected(server) as client:
            client.send(post(b"{}"))
            assert (await client.response())[0] == 200
            assert server.num_connections <= 8
        for each in idle:
            await each.close()


async def test_a_taken_port_is_refused_and_named() -> None:
    async with serving() as server:
        other = HttpServer(echo, "127.0.0.1", server.port)
        with pytest.raises(PortInUse, match=f"port {server.port} on 127.0.0.1 is in use; .* --http-port"):
            await other.start()


async def test_servers_share_a_port_that_is_held_for_them() -> None:
    answered: set[bytes] = set()
    with hold_port("127.0.0.1", 0) as holder:
        port = holder.getsockname()[1]
        servers = []
        for name in (b'"a"', b'"b"'):

            async def app(scope: Any, receive: Any, send: Any, name: bytes = name) -> None:
                await respond(send, name)

            servers.append(HttpServer(app, "127.0.0.1", port, shared_port=True))
            await servers[-1].start()
        for _ in range(64):
            async with connected(servers[0]) as client:
                client.send(get())
                answered.add((await client.response())[2])
        for server in servers:
            await server.stop(0)
    assert answered == {b'"a"', b'"b"'}


async def test_stopping_lets_responses_finish_and_closes_idle_connections() -> None:
    running, finish = asyncio.Event(), asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await read_body(receive)
        running.set()
        await finish.wait()
        await respond(send, b"{}")

    async with serving(slow) as server, connected(server) as idle, connected(server) as client:
        client.send(post(b"{}"))
        await running.wait()
        stopping = asyncio.create_task(server.stop(10 * WAIT_S))
        assert await idle.rest() == b""
        assert not stopping.done()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", server.port)
        finish.set()
        assert (await client.response())[0] == 200
        assert await client.rest() == b""
        await stopping


async def test_stopping_cuts_responses_that_take_longer() -> None:
    running = asyncio.Event()
    ended: list[str] = []

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("ended")

    async with serving(endless) as server, connected(server) as client:
        client.send(get())
        await running.wait()
        await server.stop(0.05)
        assert ended == ["ended"]
        assert await client.rest() == b""


async def test_pages_of_other_origins_are_let_in_only_if_configured() -> None:
    preflight = get("/", "Origin: https://a.example", "Access-Control-Request-Method: POST").replace(b"GET", b"OPTIONS")
    for origins, allowed in (((), None), (("https://a.example",), "https://a.example"), (("https://b.example",), None)):
        async with serving(cors_origins=origins) as server, connected(server) as client:
            client.send(preflight)
            _, headers, _ = await client.response()
            assert headers.get("access-control-allow-origin") == allowed
            assert len(headers["x-request-id"]) == 32  # even of this answer, which no endpoint gives
            client.send(get("/", "Origin: https://a.example"))
            assert (await client.response())[1].get("access-control-allow-origin") == allowed


def test_listening_sockets_of_strangers_are_kept_out() -> None:
    async def run() -> None:
        async with serving() as server:
            with socket.socket() as other:
                other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                with pytest.raises(OSError, match="in use"):
                    other.bind(("127.0.0.1", server.port))

    asyncio.run(run())
