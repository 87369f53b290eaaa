"""Server-sent events: what is written, and when."""

import asyncio
from collections.abc import MutableMapping
from typing import Any

from tests.router.http.http_rig import WAIT_S, connected, get, serving
from tests.router.virtual_time import in_virtual_time
from trunkline_router.edge.http.sse import DONE, KEEP_ALIVE, EventStream, event


def test_events_have_the_shape_of_the_standard() -> None:
    assert event(b"{}") == b"data: {}\n\n"
    assert event(b"{}", b"ping") == b"event: ping\ndata: {}\n\n"


async def test_events_come_with_headers_that_proxies_understand() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        stream = EventStream(send, headers=lambda: [(b"x-request-id", b"a")])
        with stream:
            await stream.write(event(b"1"))
            await stream.end(event(b"2") + DONE)

    async with serving(app) as server, connected(server) as client:
        for _ in range(2):
            client.send(get())
            status, headers, body = await client.response()
            assert status == 200
            assert headers["content-type"] == "text/event-stream; charset=utf-8"
            assert (headers["cache-control"], headers["x-accel-buffering"]) == ("no-cache", "no")
            assert headers["x-request-id"] == "a"
            assert body == b"data: 1\n\ndata: 2\n\ndata: [DONE]\n\n"


async def test_each_event_is_sent_when_it_is_written() -> None:
    go_on = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        stream = EventStream(send)
        with stream:
            await stream.write(event(b"1"))
            await go_on.wait()
            await stream.end(DONE)

    async with serving(app) as server, connected(server) as client:
        client.send(get())
        while await client.line() != b"data: 1\n":
            pass
        go_on.set()
        async with asyncio.timeout(WAIT_S):
            assert b"data: [DONE]" in await client.reader.readuntil(b"0\r\n\r\n")


class Clocked:
    """The messages that an event stream sends, with the loop's time."""

    def __init__(self) -> None:
        self.bodies: list[tuple[float, bytes]] = []
        self.status: int | None = None

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.bodies.append((asyncio.get_running_loop().time(), message["body"]))


def test_comments_fill_silence_and_nothing_else() -> None:
    async def run() -> list[tuple[float, bytes]]:
        clocked = Clocked()
        stream = EventStream(clocked.send, keep_alive_s=15.0)
        with stream:
            for pause_s in (10.0, 14.0, 40.0, 1.0):
                await asyncio.sleep(pause_s)
                await stream.write(b"e")
            await stream.end(b"d")
            await asyncio.sleep(100.0)
        return clocked.bodies

    assert in_virtual_time(run()) == [
        *((10.0, b"e"), (24.0, b"e"), (39.0, KEEP_ALIVE), (54.0, KEEP_ALIVE), (64.0, b"e"), (65.0, b"e"), (65.0, b"d"))
    ]


def test_status_is_not_sent_before_the_first_event_or_comment() -> None:
    async def run() -> None:
        clocked = Clocked()
        stream = EventStream(clocked.send, keep_alive_s=15.0)
        with stream:
            await asyncio.sleep(14.9)
            assert clocked.status is None
            assert not stream.has_begun
            await asyncio.sleep(0.2)
            assert clocked.status == 200
            assert stream.has_begun

    in_virtual_time(run())


def test_stream_that_fails_sends_no_comments_afterwards() -> None:
    async def run() -> None:
        clocked = Clocked()
        try:
            with EventStream(clocked.send, keep_alive_s=15.0):
                raise ValueError
        except ValueError:
            await asyncio.sleep(100.0)
        assert clocked.status is None

    in_virtual_time(run())


def test_comments_can_be_turned_off() -> None:
    async def run() -> None:
        clocked = Clocked()
        with EventStream(clocked.send, keep_alive_s=0):
            await asyncio.sleep(1000.0)
        assert not clocked.bodies

    in_virtual_time(run())


def test_comment_that_the_client_does_not_read_is_not_followed_by_more() -> None:
    async def run() -> None:
        sent = 0

        async def stuck(message: MutableMapping[str, Any]) -> None:
            nonlocal sent
            if message["type"] == "http.response.body":
                sent += 1
                await asyncio.Event().wait()

        with EventStream(stuck, keep_alive_s=15.0):
            await asyncio.sleep(1000.0)
        assert sent == 1

    in_virtual_time(run())
