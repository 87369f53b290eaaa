"""What of a request is neither URL, header value nor body: it is bounded, however it is cut into segments."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from tests.router.http.http_rig import CHUNKED_END, Client, connected, echo, get, post, respond, serving
from trunkline_router.edge.http.connection import Connection
from trunkline_router.edge.http.limits import HttpLimits
from trunkline_router.edge.http.server import HttpServer

LONG = HttpLimits(head_s=60.0, body_s=60.0, keep_alive_s=60.0, linger_s=60.0, check_s=0.02)
CHUNKED = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
ENDLESS_BYTES = 1 << 20


async def refuse_early(scope: Any, receive: Any, send: Any) -> None:
    """Answers without a look at the body."""
    await respond(send, b"{}", 401)


async def send_in(client: Client, data: bytes, piece_bytes: int) -> None:
    """Sends pieces, between which the server runs."""
    for start in range(0, len(data), piece_bytes):
        client.send(data[start : start + piece_bytes])
        await client.writer.drain()
        await asyncio.sleep(0)


async def accepted(server: HttpServer, client: Client) -> Connection:
    """The server's end, which can be given segments of exact lengths. One request has been answered."""
    client.send(get())
    await client.response()
    [connection] = list(server.connections)
    return connection


@pytest.mark.parametrize("piece_bytes", [1000, ENDLESS_BYTES])
@pytest.mark.parametrize("begin", [b"1\r\nx\r\n0\r\nX: ", b"0\r\nX", b"0;", b"1\r\nx\r\n1;a="])
async def test_trailers_and_chunk_extensions_are_bounded(begin: bytes, piece_bytes: int) -> None:
    async with serving(limits=LONG) as server, connected(server) as client:
        await send_in(client, CHUNKED + begin, piece_bytes)
        await send_in(client, b"a" * ENDLESS_BYTES, piece_bytes)
        status, headers, _ = await client.response()
        assert (status, headers["connection"]) == (431, "close")
        assert await client.rest() == b""


@pytest.mark.parametrize("piece_bytes", [1000, ENDLESS_BYTES])
async def test_endless_trailer_after_the_response_closes_the_connection(piece_bytes: int) -> None:
    async with serving(refuse_early, limits=LONG) as server, connected(server) as client:
        client.send(CHUNKED + b"0\r\nX: ")
        assert (await client.response())[0] == 401
        await send_in(client, b"a" * ENDLESS_BYTES, piece_bytes)
        assert await client.rest() == b""


async def test_extensions_of_many_chunks_are_bounded_together() -> None:
    async with serving(limits=LONG) as server, connected(server) as client:
        await send_in(client, CHUNKED + (b"1;" + b"a" * 1000 + b"\r\nx\r\n") * 1000, 5000)
        assert (await client.response())[0] == 431


@pytest.mark.parametrize("size", [b"1", b"00000001"])
@pytest.mark.parametrize("piece_bytes", [777, 1 << 20])
async def test_chunks_of_one_byte_are_taken(size: bytes, piece_bytes: int) -> None:
    body = json.dumps({"a": "b" * 40_000}).encode()
    chunks = b"".join(b"%b\r\n%c\r\n" % (size, byte) for byte in body)
    async with serving(limits=LONG) as server, connected(server) as client:
        await send_in(client, CHUNKED + chunks + CHUNKED_END, piece_bytes)
        status, _, got = await client.response()
        assert (status, json.loads(got)) == (200, ["/", json.loads(body)])


@pytest.mark.parametrize("piece_bytes", [100, 17 << 10, 1 << 20])
@pytest.mark.parametrize(("value_bytes", "status"), [((32 << 10) - 18, 200), (32 << 10, 431)])
async def test_limit_of_headers_does_not_depend_on_segments(value_bytes: int, status: int, piece_bytes: int) -> None:
    async with serving(limits=LONG) as server, connected(server) as client:
        connection, request = await accepted(server, client), get("/", "A: " + "b" * value_bytes)
        for start in range(0, len(request), piece_bytes):
            connection.data_received(request[start : start + piece_bytes])
        assert (await client.response())[0] == status


async def test_header_that_begins_behind_another_request_is_not_charged_for_it() -> None:
    large, second = post(json.dumps({"a": "b" * 150_000}).encode()), get("/second")
    async with serving(refuse_early, limits=LONG) as server, connected(server) as client:
        connection = await accepted(server, client)
        connection.data_received(large[:1000])
        assert (await client.response())[0] == 401
        connection.data_received(large[1000:] + second[:-10])
        connection.data_received(second[-10:])
        assert (await client.response())[0] == 401


@pytest.mark.parametrize(
    ("limits", "rest"),
    [
        pytest.param(replace(LONG, body_s=0.2, head_s=0.2), b"", id="late"),
        pytest.param(replace(LONG, max_body_bytes=10), b"64\r\n" + b"x" * 100 + b"\r\n", id="large"),
        pytest.param(LONG, b"not a chunk", id="malformed"),
    ],
)
async def test_problem_of_a_body_whose_request_is_answered_gets_no_second_response(
    limits: HttpLimits, rest: bytes
) -> None:
    async with serving(refuse_early, limits=limits) as server, connected(server) as client:
        client.send(CHUNKED)
        assert (await client.response())[0] == 401
        client.send(rest)
        assert await client.rest() == b""


@pytest.mark.parametrize("bad", [b"GET / HTTP/1.1\r\n\r\n", b"garbage\r\n\r\n"])
async def test_request_behind_one_that_was_answered_early_has_its_own_refusal(bad: bytes) -> None:
    async with serving(refuse_early, limits=LONG) as server, connected(server) as client:
        client.send(CHUNKED)
        assert (await client.response())[0] == 401
        client.send(CHUNKED_END + bad)
        assert (await client.response())[0] == 400
        assert await client.rest() == b""


async def test_upgrade_leaves_the_version_as_it_is() -> None:
    versions: list[str] = []

    async def noted(scope: Any, receive: Any, send: Any) -> None:
        versions.append(scope["http_version"])
        await echo(scope, receive, send)

    async with serving(noted, limits=LONG) as server:
        for version in ("1.0", "1.1"):
            async with connected(server) as client:
                lines = [f"GET / HTTP/{version}", "Host: x", "Connection: Upgrade", "Upgrade: h2c", "", ""]
                client.send("\r\n".join(lines).encode())
                status, headers, _ = await client.response()
                assert (status, headers.get("connection")) == (200, "close" if version == "1.0" else None)
    assert versions == ["1.0", "1.1"]
