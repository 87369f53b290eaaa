"""What the server makes of requests: valid, too large, malformed, and several at once."""

import asyncio
import json
import socket
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from tests.router.http.http_rig import connected, echo, error_of, get, post, respond, serving
from trunkline_router.edge.http.exchange import CutOff
from trunkline_router.edge.http.limits import HttpLimits

SMALL = HttpLimits(max_url_bytes=200, max_header_bytes=1000, max_headers=10, max_body_bytes=1000)


async def test_connection_is_kept_for_further_requests() -> None:
    async with serving() as server, connected(server) as client:
        for number in range(3):
            client.send(post(b'{"n": %d}' % number))
            status, headers, body = await client.response()
            assert (status, json.loads(body)) == (200, ["/", {"n": number}])
            assert "date" in headers
            assert "server" not in headers
        assert server.num_connections == 1


async def test_of_requests_sent_ahead_the_first_one_is_answered_and_the_connection_closes() -> None:
    """Clients that send requests ahead repeat those that are not answered."""
    async with serving() as server, connected(server) as client:
        client.send(b"".join(post(b'{"n": %d}' % number, path=f"/{number}") for number in range(10)))
        _, headers, body = await client.response()
        assert json.loads(body) == ["/0", {"n": 0}]
        assert headers["connection"] == "close"
        assert await client.rest() == b""


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        pytest.param(get("/" + "a" * 300), 414, id="long target"),
        pytest.param(get("/", *["A: b"] * 20), 431, id="many headers"),
        pytest.param(get("/", "A: " + "b" * 2000), 431, id="long header"),
        pytest.param(post(b"x" * 1001), 413, id="long body"),
        pytest.param(post(b"", "Expect: 200-ok"), 417, id="expectation"),
        pytest.param(b"\x00\xff garbage\r\n\r\n", 400, id="garbage"),
        pytest.param(b"GET / HTTP/2.0\r\nHost: x\r\n\r\n", 400, id="version"),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", 400, id="no host"),
        pytest.param(get("/", "Host: y"), 400, id="two hosts"),
        pytest.param(get("/", "Bad : y"), 400, id="space before colon"),
        pytest.param(get("/", "A: b\r\n c"), 400, id="folded header"),
        pytest.param(b"GET / HTTP/1.1\nHost: x\n\n", 400, id="bare line feeds"),
        pytest.param(b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n", 400, id="connect"),
        pytest.param(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, id="HTTP/2"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, id="TLS"),
        pytest.param(post(b"{}", "Transfer-Encoding: chunked"), 400, id="length and chunked"),
        pytest.param(post(b"{}", "Content-Length: 3"), 400, id="two lengths"),
        pytest.param(get("/", "Content-Length: +2"), 400, id="signed length"),
        pytest.param(get("/", "Transfer-Encoding: gzip"), 501, id="unknown encoding"),
        pytest.param(get("/", "Transfer-Encoding: gzip, chunked"), 501, id="compressed and chunked"),
        pytest.param(get("/", "Transfer-Encoding: gzip", "Transfer-Encoding: chunked"), 501, id="the same, twice"),
        pytest.param(post(b"{}", "Content-Encoding: gzip"), 415, id="compressed body"),
        pytest.param(get("/", "Transfer-Encoding: chunked", "Transfer-Encoding: identity"), 400, id="two encodings"),
    ],
)
async def test_bad_request_is_refused_with_its_status_and_the_connection_closes(
    request_bytes: bytes, status: int
) -> None:
    handled: list[str] = []

    async def noted(scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        handled.append(message["type"])

    async with serving(noted, limits=SMALL) as server, connected(server) as client:
        client.send(request_bytes + get("/smuggled"))
        got, headers, body = await client.response()
        assert got == status
        assert headers["connection"] == "close"
        assert error_of(body)["type"] == "invalid_request_error"
        assert await client.rest() == b""
        assert "http.request" not in handled


async def test_blanks_around_a_header_value_are_no_part_of_it() -> None:
    seen: dict[bytes, bytes] = {}

    async def noted(scope: Any, receive: Any, send: Any) -> None:
        seen.update(scope["headers"])
        await echo(scope, receive, send)

    async with serving(noted) as server, connected(server) as client:
        client.send(post(b"{}", "x-api-key:\t key \t ", "x-empty:  ", "Content-Encoding: identity "))
        assert (await client.response())[0] == 200
    assert (seen[b"x-api-key"], seen[b"x-empty"]) == (b"key", b"")


async def test_chunked_body_is_bounded_as_it_arrives() -> None:
    async with serving(limits=SMALL) as server, connected(server) as client:
        client.send(b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(11):
            client.send(b"64\r\n" + b"x" * 100 + b"\r\n")
        assert (await client.response())[0] == 413
        assert await client.rest() == b""


async def test_chunks_make_one_body_and_trailers_are_not_headers() -> None:
    seen: list[Any] = []

    async def noted(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0)
        seen.append(scope["headers"])
        await echo(scope, receive, send)

    async with serving(noted) as server, connected(server) as client:
        client.send(
            b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
            b'3;a=b\r\n{"a\r\n5\r\n": 1}\r\n0\r\nAuthorization: Bearer forged\r\n\r\n'
        )
        assert json.loads((await client.response())[2]) == ["/", {"a": 1}]
        assert all(name != b"authorization" for name, _ in seen[0])


async def test_expected_continue_comes_before_the_body_but_not_for_one_that_is_too_large() -> None:
    async with serving(limits=SMALL) as server:
        async with connected(server) as client:
            client.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n")
            assert await client.line() + await client.line() == b"HTTP/1.1 100 Continue\r\n\r\n"
            client.send(b"{}")
            assert (await client.response())[0] == 200
        async with connected(server) as client:
            client.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2000\r\nExpect: 100-continue\r\n\r\n")
            assert (await client.response())[0] == 413


async def test_expected_body_that_is_malformed_is_refused_and_no_error_of_the_server() -> None:
    with capture_logs() as logged:
        async with serving() as server, connected(server) as client:
            lines = ["POST / HTTP/1.1", "Host: x", "Transfer-Encoding: chunked", "Expect: 100-continue", "", "ZZ", ""]
            client.send("\r\n".join(lines).encode())
            assert (await client.response())[0] == 400
            assert await client.rest() == b""
    assert "error" not in {line["log_level"] for line in logged}


async def test_response_before_continue_closes_the_connection() -> None:
    """Whether the client then sends the body is not known: its next request could be taken for the body."""

    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        await respond(send, b"{}", 401)

    async with serving(refuse) as server, connected(server) as client:
        client.send(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 60\r\nExpect: 100-continue\r\n\r\n")
        status, headers, _ = await client.response()
        assert (status, headers.get("connection")) == (401, "close")
        client.send(get())
        assert await client.rest() == b""


async def test_http_1_0_gets_no_continue() -> None:
    async with serving() as server, connected(server) as client:
        client.send(b"POST / HTTP/1.0\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n")
        await asyncio.sleep(0.05)  # for a response that must not come
        client.send(b"{}")
        assert (await client.rest()).startswith(b"HTTP/1.1 200 OK\r\n")


async def test_what_is_sent_while_a_request_is_answered_is_discarded() -> None:
    running, finish = asyncio.Event(), asyncio.Event()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        running.set()
        await finish.wait()
        await echo(scope, receive, send)

    async with serving(slow) as server, connected(server) as client:
        client.send(get())
        await running.wait()
        client.send(b"x" * (32 << 20))
        await client.writer.drain()
        finish.set()
        assert (await client.response())[0] == 200
        assert await client.rest() == b""


async def test_refusal_reaches_a_client_that_reads_only_when_all_is_sent() -> None:
    """A connection that is closed with unread data is reset, and its client then loses what it has not read."""
    loop = asyncio.get_running_loop()
    async with serving() as server, asyncio.timeout(60):
        with socket.socket() as client:
            client.setblocking(False)
            await loop.sock_connect(client, ("127.0.0.1", server.port))
            await loop.sock_sendall(client, b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\n\r\n")
            await loop.sock_sendall(client, b"x" * (16 << 20))
            assert b" 413 " in await loop.sock_recv(client, 1 << 16)


async def test_closing_is_honoured_and_later_requests_are_not_answered() -> None:
    async with serving() as server, connected(server) as client:
        client.send(get("/", "Connection: close") + get("/second"))
        status, headers, body = await client.response()
        assert (status, headers["connection"], json.loads(body)[0]) == (200, "close", "/")
        assert await client.rest() == b""


async def test_http_1_0_gets_a_body_without_chunks_that_ends_with_the_connection() -> None:
    async def streamed(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for part in (b"one", b"two"):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body"})

    async with serving(streamed) as server, connected(server) as client:
        client.send(b"GET / HTTP/1.0\r\n\r\n")
        head, _, body = (await client.rest()).partition(b"\r\n\r\n")
        assert b"chunked" not in head
        assert body == b"onetwo"


async def test_head_has_the_headers_of_get_without_its_body() -> None:
    async with serving() as server, connected(server) as client:
        client.send(get().replace(b"GET", b"HEAD"))
        async with asyncio.timeout(60):
            head = await client.reader.readuntil(b"\r\n\r\n")
        assert b"content-length: 11" in head
        client.send(get())
        assert (await client.response())[0] == 200  # and not the body of HEAD


async def test_upgrade_is_ignored_and_requests_are_answered_with_their_bodies() -> None:
    upgrade = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMA")
    async with serving() as server, connected(server) as client:
        for number, headers in ((1, upgrade), (2, upgrade), (3, ())):
            client.send(post(b'{"n": %d}' % number, *headers))
            status, _, body = await client.response()
            assert (status, json.loads(body)) == (200, ["/", {"n": number}])


async def test_absolute_target_and_escapes_give_the_path() -> None:
    async with serving() as server, connected(server) as client:
        for target, path in (("http://x/a?b=c", "/a"), ("http://x", "/"), ("/a%2Fb%20c", "/a/b c")):
            client.send(get(target))
            assert json.loads((await client.response())[2])[0] == path


async def test_handler_that_fails_gives_internal_with_an_id_and_nothing_else() -> None:
    async def failing(scope: Any, receive: Any, send: Any) -> None:
        raise ValueError("secret prompt")

    async with serving(failing) as server, connected(server) as client:
        client.send(get())
        status, headers, body = await client.response()
        assert status == 500
        assert headers["x-request-id"] in error_of(body)["message"]
        assert b"secret" not in body


async def test_handler_that_fails_within_a_response_cuts_it() -> None:
    async def failing(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"part", "more_body": True})
        raise ValueError

    async with serving(failing) as server, connected(server) as client:
        client.send(get())
        got = await client.rest()
        assert got.endswith(b"\r\n\r\n4\r\npart\r\n")


@pytest.mark.parametrize(
    ("error", "logged"), [(CutOff, []), (None, ["a handler returned without a complete response"])]
)
async def test_a_response_that_is_cut_off_is_no_error_of_the_server_unless_its_end_is_forgotten(
    error: type[Exception] | None, logged: list[str]
) -> None:
    async def cutting(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"part", "more_body": True})
        if error is not None:
            raise error

    with capture_logs() as logs:
        async with serving(cutting) as server, connected(server) as client:
            client.send(get())
            assert (await client.rest()).endswith(b"\r\n\r\n4\r\npart\r\n")
    assert [line["event"] for line in logs] == logged


async def test_a_complete_response_is_not_cut_off() -> None:
    async def late(scope: Any, receive: Any, send: Any) -> None:
        await respond(send, b"{}")
        raise CutOff

    async with serving(late) as server, connected(server) as client:
        for _ in range(2):
            client.send(get())
            assert (await client.response())[0] == 200


async def test_header_values_cannot_add_headers() -> None:
    async def splitting(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"x-request-id", b"a\r\nSet-Cookie: b")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body"})

    async with serving(splitting) as server, connected(server) as client:
        client.send(get())
        status, headers, _ = await client.response()
        assert status == 500
        assert "set-cookie" not in {name.lower() for name in headers}


ATOMS = (
    *(b"GET / HTTP/1.1\r\n", b"POST /a HTTP/1.1\r\n", b"Host: x\r\n", b"\r\n", b"\n", b"Content-Length: 5\r\n"),
    *(b"Transfer-Encoding: chunked\r\n", b"5\r\nhello\r\n", b"0\r\n\r\n", b"Expect: 100-continue\r\n", b"{}", b"\x00"),
    *(b"Connection: close\r\n", b"Upgrade: h2c\r\nConnection: Upgrade\r\n", b"HTTP/1.1", b": ", b"A" * 500),
)
PIECES = st.lists(st.one_of(st.sampled_from(ATOMS), st.binary(max_size=40)), max_size=12)


@settings(max_examples=150)
@given(connections=st.lists(PIECES, min_size=1, max_size=4))
def test_server_survives_any_bytes_and_then_serves_a_good_request(connections: list[list[bytes]]) -> None:
    async def run() -> None:
        problems: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
        async with serving(limits=SMALL) as server:
            for pieces in connections:
                async with connected(server) as client:
                    for piece in pieces:
                        client.send(piece)
                        await asyncio.sleep(0)
            async with connected(server) as client:
                client.send(post(b"{}"))
                assert (await client.response())[0] == 200
        assert server.num_connections == 0
        assert not problems

    asyncio.run(run())


async def test_response_without_an_end_is_internal() -> None:
    async def short(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/ok":
            await respond(send, b"{}")

    async with serving(short) as server:
        for path, status in (("/none", 500), ("/ok", 200)):
            async with connected(server) as client:
                client.send(get(path))
                assert (await client.response())[0] == status
