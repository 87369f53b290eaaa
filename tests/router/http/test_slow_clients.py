"""Clients that send slowly, read slowly, or go."""

import asyncio
import socket
import struct
import time
from dataclasses import replace
from typing import Any

import pytest

from tests.router.http.http_rig import SHORT, WAIT_S, connected, error_of, get, post, serving
from tests.router.http.unread_pages import PAGE_BYTES, Pages, paused, unreading
from trunkline_router.edge.http.connection import HIGH_WATER_BYTES, Phase
from trunkline_router.edge.http.json_body import read_body
from trunkline_router.edge.http.sse import EventStream, event

LONG = replace(SHORT, head_s=60.0, body_s=60.0, keep_alive_s=60.0, linger_s=60.0)


async def dribble(client: Any, byte: bytes) -> None:
    """Sends a byte again and again, until it is cancelled."""
    while True:
        client.send(byte)
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("begin", "byte", "limits"),
    [
        pytest.param(b"GET / HTTP/1.1\r\nHost: x\r\nA: ", b"b", replace(LONG, head_s=0.2), id="headers"),
        pytest.param(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9999\r\n\r\n", b"x", replace(LONG, body_s=0.2),
                     id="body"),
        pytest.param(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n",
                     replace(LONG, body_s=0.2), id="chunks"),
    ],
)  # fmt: skip
async def test_a_request_that_dribbles_is_refused_in_time(begin: bytes, byte: bytes, limits: Any) -> None:
    async with serving(limits=limits) as server, connected(server) as client:
        client.send(begin)
        dribbling = asyncio.create_task(dribble(client, byte))
        try:
            status, _, body = await client.response()
        finally:
            dribbling.cancel()
        assert status == 408
        assert error_of(body)["code"] == "request_timeout"


@pytest.mark.parametrize("sent", [b"", b"\r\n", get()])
async def test_an_idle_connection_is_closed(sent: bytes) -> None:
    limits = replace(LONG, head_s=0.2, keep_alive_s=0.2)
    async with serving(limits=limits) as server, connected(server) as client:
        client.send(sent)
        got = await client.rest()
        assert (b"200 OK" in got) == (sent == get())
        assert b"408" not in got


def resetting(server: Any, data: bytes) -> socket.socket:
    """A connection that has sent the data, and that is reset when it is closed."""
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.sendall(data)
    return connection


async def test_connection_can_be_ended_after_its_client_has_reset_it() -> None:
    async with serving(limits=LONG) as server:
        client = resetting(server, b"GET / HTTP/1.1\r\nHost: x\r\n")
        async with asyncio.timeout(WAIT_S):
            while not any(  # noqa: ASYNC110  # what the server has read has no event
                one._phase is Phase.HEAD for one in server.connections
            ):
                await asyncio.sleep(0)
        [connection] = list(server.connections)
        client.close()
        connection.shutdown()  # without a turn of the event loop, which would tell the server
        async with asyncio.timeout(WAIT_S):
            await server.all_closed()


async def test_time_for_an_answer_is_not_limited() -> None:
    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await read_body(receive)
        await asyncio.sleep(6 * SHORT.body_s)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    async with serving(slow, limits=SHORT) as server, connected(server) as client:
        client.send(post(b"{}"))
        assert (await client.response())[0] == 200


async def test_handler_ends_at_once_when_its_client_goes_while_it_waits() -> None:
    ended: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    waiting = asyncio.Event()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        await read_body(receive)
        try:
            waiting.set()
            await asyncio.Event().wait()
        except BaseException as error:
            ended.set_result(error)
            raise

    async with serving(endless) as server:
        async with connected(server) as client:
            client.send(post(b"{}"))
            await waiting.wait()
        async with asyncio.timeout(WAIT_S):
            assert isinstance(await ended, asyncio.CancelledError)


@pytest.mark.parametrize("is_split", [False, True], ids=["one read", "many reads"])
async def test_client_that_goes_is_noticed_whatever_it_has_sent_behind_its_request(is_split: bool) -> None:
    ended: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        try:
            await read_body(receive)
            await asyncio.Event().wait()
        except BaseException as error:
            ended.set_result(error)
            raise

    more = post(bytes(200_000))
    async with serving(endless, limits=LONG) as server, connected(server) as client:
        client.send(post(b"{}"))
        while not server.connections or not all(one.is_busy() for one in server.connections):  # noqa: ASYNC110
            await asyncio.sleep(0)
        [connection] = list(server.connections)
        for start in range(0, len(more), 10_000) if is_split else (0,):
            connection.data_received(more[start : start + 10_000] if is_split else more)
        assert not ended.done()
        await client.close()
        async with asyncio.timeout(5.0):
            assert isinstance(await ended, asyncio.CancelledError)


async def test_body_that_is_cut_ends_the_handler() -> None:
    ended: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    begun = asyncio.Event()

    async def reads(scope: Any, receive: Any, send: Any) -> None:
        begun.set()
        try:
            await read_body(receive)
        except BaseException as error:
            ended.set_result(error)
            raise

    async with serving(reads) as server:
        async with connected(server) as client:
            client.send(post(b"12345")[:-2])
            await begun.wait()
        async with asyncio.timeout(WAIT_S):
            assert isinstance(await ended, asyncio.CancelledError)


async def test_output_that_the_client_does_not_read_stays_with_its_producer() -> None:
    """Beyond the client's own receive buffer, the server takes no more than some tens of KiB."""
    written_bytes, chunk = 0, event(b"x" * 1000)

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        nonlocal written_bytes
        stream = EventStream(send, keep_alive_s=0)
        with stream:
            while True:
                await stream.write(chunk)
                written_bytes += len(chunk)
                await asyncio.sleep(0)

    async with serving(endless) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
        writer.write(get())
        written = -1
        async with asyncio.timeout(WAIT_S):
            while written != written_bytes:  # until it has stopped
                written = written_bytes
                await asyncio.sleep(0.2)
            [connection] = list(server.connections)
            assert connection.transport.get_write_buffer_size() <= HIGH_WATER_BYTES + 2 * len(chunk)
            # Whatever the kernels took is bounded too, and a client that reads again gets all.
            assert written_bytes < 8 << 20
            got = 0
            while got < 2 * written:
                got += len(await reader.read(1 << 16))
        writer.close()


async def test_client_that_does_not_read_the_end_of_a_response_is_cut() -> None:
    begun = asyncio.Event()

    async def large(scope: Any, receive: Any, send: Any) -> None:
        begun.set()
        headers = [(b"connection", b"close"), (b"content-length", b"%d" % (32 << 20))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": bytes(32 << 20)})

    async with serving(large, limits=replace(LONG, unread_s=0.2)) as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
        writer.write(get())
        await writer.drain()
        async with asyncio.timeout(WAIT_S):
            await begun.wait()
            await server.all_closed()
        writer.close()


@pytest.mark.parametrize("streams", [False, True], ids=["complete", "stream"])
async def test_client_that_reads_nothing_of_its_answer_is_dropped_after_a_while(streams: bool) -> None:
    pages = Pages(1 << 16 if streams else PAGE_BYTES, streams=streams)
    async with serving(pages, limits=replace(LONG, unread_s=0.5)) as server:
        async with unreading(server, get()):
            await paused(server)
            async with asyncio.timeout(WAIT_S):
                await server.all_closed()
        async with asyncio.timeout(WAIT_S):
            while pages.ended < pages.begun:  # noqa: ASYNC110  # a handler's end has no event
                await asyncio.sleep(0)


async def test_client_that_goes_on_sending_is_dropped_whether_or_not_it_reads() -> None:
    """The kernel's limit does not end it if it reads a little now and then."""
    pages = Pages(PAGE_BYTES)
    pages.headers.append((b"connection", b"close"))
    limits = replace(LONG, unread_s=30.0, check_s=3600.0)
    async with serving(pages, limits=limits) as server, unreading(server, post(b"{}")[:-1]):
        connection, now_s = await paused(server), time.monotonic()
        connection.overdue(now_s + limits.unread_s / 2)
        assert not connection.transport.is_closing()
        connection.overdue(now_s + limits.unread_s + 1.0)
        assert connection.transport.is_closing()


@pytest.mark.parametrize("closes", [False, True], ids=["kept", "closing"])
async def test_client_that_reads_slowly_gets_its_whole_answer(closes: bool) -> None:
    """It takes longer than it may read nothing."""
    pages = Pages(PAGE_BYTES)
    if closes:
        pages.headers.append((b"connection", b"close"))
    limits = replace(LONG, unread_s=1.0, linger_s=0.2)
    async with serving(pages, limits=limits) as server, unreading(server, get()) as client:
        await paused(server)
        loop, got, begin_s = asyncio.get_running_loop(), 0, time.monotonic()
        async with asyncio.timeout(WAIT_S):
            while got < PAGE_BYTES:
                got += (await loop.sock_recv(client, 64 << 10)).count(b"\0")
                await asyncio.sleep(0.02)
        assert time.monotonic() - begin_s > 2 * limits.unread_s


async def test_client_that_reads_no_answers_gets_no_further_ones() -> None:
    """Its output is bounded: requests behind an answer that it has not read are not answered."""
    pages = Pages(PAGE_BYTES)
    loop = asyncio.get_running_loop()
    async with serving(pages, limits=LONG) as server, unreading(server, get()) as client:
        await paused(server)
        for _ in range(5):
            await loop.sock_sendall(client, get())
        got = 0
        async with asyncio.timeout(WAIT_S):
            while read := await loop.sock_recv(client, 1 << 20):
                got += read.count(b"\0")
        assert (pages.begun, got) == (1, PAGE_BYTES)
