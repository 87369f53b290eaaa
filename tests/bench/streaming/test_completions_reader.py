"""The benchmark's HTTP client sees every event and the end of an answer, however the network splits it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from trunkline_bench.streaming.completions import RefusedError, open_connections

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENTS = [b'{"text":"a"}', b'{"text":"0"}', b'{"usage":1}']


def chunked(*bodies: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(body), body) for body in (*bodies, b""))


ANSWER = HEAD + chunked(*(b"data: %s\n\n" % event for event in (*EVENTS, b"[DONE]")))


@asynccontextmanager
async def answering(pieces: list[bytes]) -> AsyncIterator[str]:
    """A server that sends the same answer to every request, piece by piece."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1 << 16):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize("piece_bytes", [1, 7, len(ANSWER)])
async def test_every_event_is_seen_and_the_connection_is_free_for_the_next_request(piece_bytes: int) -> None:
    pieces = [ANSWER[at : at + piece_bytes] for at in range(0, len(ANSWER), piece_bytes)]
    async with answering(pieces) as address, open_connections(address) as connect:
        connection = connect()
        for _ in range(3):
            assert [event async for event in connection.events(b"{}")] == EVENTS


async def test_an_answer_that_is_not_a_stream_is_an_error_with_the_answer() -> None:
    refusal = b'HTTP/1.1 503 Service Unavailable\r\ncontent-length: 12\r\n\r\n"no workers"'
    async with answering([refusal]) as address, open_connections(address) as connect:
        with pytest.raises(RefusedError, match=r"(?s)503.*no workers"):
            [event async for event in connect().events(b"{}")]


@pytest.mark.parametrize("piece_bytes", [1, 1000])
async def test_an_answer_that_is_not_streamed_is_read_whole(piece_bytes: int) -> None:
    answer = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 12\r\n\r\n{"choices":0'
    pieces = [answer[at : at + piece_bytes] for at in range(0, len(answer), piece_bytes)]
    async with answering(pieces) as address, open_connections(address) as connect:
        connection = connect()
        for _ in range(2):
            assert [body async for body in connection.body(b"{}")] == [b'{"choices":0']


async def test_a_refusal_is_an_error_for_an_answer_that_is_not_streamed_too() -> None:
    refusal = b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 2\r\n\r\n{}"
    async with answering([refusal]) as address, open_connections(address) as connect:
        with pytest.raises(RefusedError, match=r"(?s)429.*\{\}"):
            [body async for body in connect().body(b"{}")]
