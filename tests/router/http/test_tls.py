"""HTTP over TLS: handshakes that are never completed, and a certificate that is replaced while the server runs."""

import asyncio
import errno
import os
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvloop
from structlog.testing import capture_logs

from tests.router.http.http_rig import SHORT, WAIT_S, Client, connected, echo, get, post, serving
from trunkline_router.edge.http import server as http_server
from trunkline_router.edge.http.connection import Connection
from trunkline_router.edge.http.server import HttpServer

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}  # tests and routers
SILENT = 2000
MOST = 64
MOST_HANDSHAKES = MOST // 4
SPARE_FILES = 8
LARGE_BYTES = 8 << 20


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A new self-signed certificate for localhost, and its key."""
    paths = folder / f"{name}.crt", folder / f"{name}.key"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-days", "1", "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-out", str(paths[0]), "-keyout", str(paths[1])),
        ],
        check=True,
        capture_output=True,
    )
    return paths


class Tls:
    """A certificate's contexts, of the server and of clients that trust it."""

    def __init__(self, folder: Path) -> None:
        paths = certificate(folder, "localhost")
        self.server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.server.load_cert_chain(*paths)
        self.trusting = ssl.create_default_context(cafile=str(paths[0]))

    async def connect(self, server: HttpServer, host: str = "127.0.0.1") -> Client:
        address = (host, 0)
        return Client(*await asyncio.open_connection("127.0.0.1", server.port, ssl=self.trusting, local_addr=address))

    def connected_socket(self, server: HttpServer) -> ssl.SSLSocket:
        """A connection that reads no further than it is asked to."""
        plain = socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S)
        return self.trusting.wrap_socket(plain, server_hostname="127.0.0.1")


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return Tls(tmp_path_factory.mktemp("tls"))


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    """Runs a test in each kind of event loop, and fails if the loop has reported an error."""

    def run_in_loop(test: Coroutine[Any, Any, None]) -> None:
        problems: list[Any] = []
        with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
            runner.get_loop().set_exception_handler(lambda _, context: problems.append(context))
            runner.run(test)
        assert not problems

    return run_in_loop


async def nothing_open(server: HttpServer) -> None:
    """Returns once there are neither connections nor handshakes."""
    async with asyncio.timeout(WAIT_S):
        while server.num_connections:  # noqa: ASYNC110  # the end of a handshake has no event
            await asyncio.sleep(0)


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@asynccontextmanager
async def flooding(server: HttpServer) -> AsyncIterator[None]:
    """Another process has opened SILENT connections, and keeps those that the server does not close."""
    client = await asyncio.create_subprocess_exec(
        *(sys.executable, str(Path(__file__).with_name("idle_connections.py")), str(server.port), str(SILENT)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert client.stdin is not None
    assert client.stdout is not None
    try:
        async with asyncio.timeout(2 * WAIT_S):
            await client.stdout.readline()
        yield
    finally:
        client.stdin.close()
        await client.wait()


def test_applications_are_told_that_the_scheme_is_https(
    run: Callable[[Coroutine[Any, Any, None]], None], tls: Tls
) -> None:
    schemes: list[str] = []

    async def told(scope: Any, receive: Any, send: Any) -> None:
        schemes.append(scope["scheme"])
        await echo(scope, receive, send)

    async def asked() -> None:
        async with serving(told, ssl_context=tls.server) as server:
            client = await tls.connect(server)
            client.send(get())
            await client.response()
            await client.close()

    run(asked())
    assert schemes == ["https"]


@pytest.mark.parametrize(("number", "has_paused"), [(errno.EMFILE, True), (errno.ECONNABORTED, False)])
async def test_accepting_pauses_only_for_want_of_resources(
    number: int, has_paused: bool, tls: Tls, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    accept, pause_s = loop.sock_accept, 0.2 if has_paused else WAIT_S
    begun_s, failed_s = list[float](), 0.0

    async def failing_once(listener: socket.socket) -> Any:
        nonlocal failed_s
        begun_s.append(time.monotonic())
        accepted = await accept(listener)
        if len(begun_s) > 1:
            return accepted
        accepted[0].close()
        failed_s = time.monotonic()
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(loop, "sock_accept", failing_once)
    monkeypatch.setattr(http_server, "NO_ROOM_PAUSE_S", pause_s)
    async with serving(ssl_context=tls.server) as server:
        with suppress(OSError):
            await tls.connect(server)
        client = await tls.connect(server)
        await client.close()
    assert (begun_s[1] - failed_s > pause_s / 2) is has_paused


def test_silent_connections_of_one_host_take_few_descriptors_and_keep_no_client_out(
    run: Callable[[Coroutine[Any, Any, None]], None], tls: Tls
) -> None:
    async def flooded() -> None:
        async with serving(ssl_context=tls.server, max_connections=MOST) as server:
            client, before = await tls.connect(server), num_files()
            async with flooding(server), asyncio.timeout(WAIT_S):
                while num_files() > before + MOST_HANDSHAKES + SPARE_FILES:  # noqa: ASYNC110  # closing has no event
                    await asyncio.sleep(0.01)
                assert 1 < server.num_connections <= MOST_HANDSHAKES + 1
                for each in (client, await tls.connect(server)):  # one that was idle meanwhile, and a new one
                    each.send(post(b"{}"))
                    assert (await each.response())[0] == 200
                    await each.close()
            await nothing_open(server)

    run(flooded())


def test_silent_connections_from_as_many_hosts_as_there_may_be_handshakes_keep_no_client_out(
    run: Callable[[Coroutine[Any, Any, None]], None], tls: Tls
) -> None:
    async def crowded() -> None:
        async with serving(ssl_context=tls.server, max_connections=MOST) as server, AsyncExitStack() as silent:
            for number in range(MOST_HANDSHAKES):
                await silent.enter_async_context(connected(server, f"127.0.1.{number + 1}"))
            client = await tls.connect(server)
            client.send(get())
            assert (await client.response())[0] == 200
            await client.close()

    run(crowded())


def test_silent_connections_close_no_established_one(
    run: Callable[[Coroutine[Any, Any, None]], None], tls: Tls
) -> None:
    async def full() -> None:
        async with serving(ssl_context=tls.server, max_connections=MOST) as server, AsyncExitStack() as opened:
            clients = [await tls.connect(server, f"127.0.0.{number % 2 + 1}") for number in range(MOST)]
            async with asyncio.timeout(WAIT_S):
                while server.num_connections > len(server.connections):  # noqa: ASYNC110  # the same
                    await asyncio.sleep(0)
            established = set(server.connections)
            hosts = [f"127.0.1.{number + 1}" for number in range(2 * MOST_HANDSHAKES)]
            silent = [await opened.enter_async_context(connected(server, host)) for host in hosts]
            assert await silent[MOST_HANDSHAKES - 1].rest() == b""  # the last one has come, and this one made room
            assert set(server.connections) == established
            assert server.num_connections == MOST
            for client in clients:
                client.send(get("/", "Connection: close"))
            answers = [await client.rest() for client in clients]
            assert sum(b"200 OK" in answer for answer in answers) == len(established)
            for client in clients:
                await client.close()

    run(full())


def test_handshake_that_takes_too_long_is_given_up(run: Callable[[Coroutine[Any, Any, None]], None], tls: Tls) -> None:
    async def late() -> None:
        async with serving(ssl_context=tls.server, limits=SHORT) as server:
            client = Client(*await asyncio.open_connection("127.0.0.1", server.port))
            client.send(b"\x16\x03\x01\x02\x00\x01")  # the first bytes of a ClientHello
            assert await client.rest() == b""
            await nothing_open(server)
            await client.close()

    run(late())


def test_clients_that_fail_leave_nothing_behind(run: Callable[[Coroutine[Any, Any, None]], None], tls: Tls) -> None:
    """Plain HTTP, a client that does not trust the certificate, and those that go at any point of a handshake."""

    async def failing() -> None:
        async with serving(ssl_context=tls.server) as server:
            plain = Client(*await asyncio.open_connection("127.0.0.1", server.port))
            plain.send(get())
            assert b"HTTP" not in await plain.rest()
            await plain.close()
            with pytest.raises(ssl.SSLCertVerificationError):
                await asyncio.open_connection("127.0.0.1", server.port, ssl=ssl.create_default_context())
            for turns in range(12):
                going = asyncio.create_task(tls.connect(server))
                for _ in range(turns):
                    await asyncio.sleep(0)
                going.cancel()
                with suppress(asyncio.CancelledError):
                    await (await going).close()
            await nothing_open(server)

    run(failing())


def test_request_that_comes_with_the_end_of_the_handshake_is_answered(
    run: Callable[[Coroutine[Any, Any, None]], None], tls: Tls
) -> None:
    """Clients of TLS 1.3 send both at once. Here a client sends everything in small and in large pieces."""

    async def at_once(piece_bytes: int) -> None:
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        client_side = tls.trusting.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
        async with serving(ssl_context=tls.server) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            got, has_asked = b"", False
            async with asyncio.timeout(WAIT_S):
                while b"\r\n\r\n" not in got:
                    with suppress(ssl.SSLWantReadError):
                        client_side.do_handshake()
                        if not has_asked:
                            client_side.write(get("/early"))
                            has_asked = True
                        got += client_side.read(1 << 16)
                    sent = outgoing.read()
                    for start in range(0, len(sent), piece_bytes):
                        writer.write(sent[start : start + piece_bytes])
                        await asyncio.sleep(0)
                    incoming.write(await reader.read(1 << 16) if b"\r\n\r\n" not in got else b"")
            assert got.startswith(b"HTTP/1.1 200 OK")
            writer.close()

    run(at_once(1 << 16))
    run(at_once(100))


def test_an_unexpected_error_of_one_connection_ends_no_other(
    run: Callable[[Coroutine[Any, Any, None]], None], tls: Tls, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with serving(ssl_context=tls.server) as server:
            made, failures = server._connection, iter([RuntimeError("a bug")])

            def connection() -> Connection:
                for failure in failures:
                    raise failure
                return made()

            monkeypatch.setattr(server, "_connection", connection)
            with capture_logs() as logs, suppress(OSError):
                await tls.connect(server)
            assert [line["event"] for line in logs] == ["unexpected error"]
            client = await tls.connect(server)
            client.send(get())
            assert (await client.response())[0] == 200
            assert server.num_connections == 1
            await client.close()

    run(test())


def test_stopping_ends_handshakes(run: Callable[[Coroutine[Any, Any, None]], None], tls: Tls) -> None:
    async def stopped() -> None:
        async with serving(ssl_context=tls.server) as server:
            silent = Client(*await asyncio.open_connection("127.0.0.1", server.port))
            async with asyncio.timeout(WAIT_S):
                while not server.num_connections:  # noqa: ASYNC110  # accepting has no event
                    await asyncio.sleep(0)
                await server.stop(10 * WAIT_S)
            assert await silent.rest() == b""
            await silent.close()

    run(stopped())


async def large(scope: Any, receive: Any, send: Any) -> None:
    """Answers with LARGE_BYTES."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % LARGE_BYTES)]})
    await send({"type": "http.response.body", "body": bytes(LARGE_BYTES)})


def test_client_that_reads_an_answer_slowly_gets_all_of_it(
    run: Callable[[Coroutine[Any, Any, None]], None], tls: Tls
) -> None:
    """It takes longer than it may read nothing."""

    async def slow() -> None:
        limits = replace(SHORT, head_s=60.0, keep_alive_s=60.0, unread_s=1.0)
        async with serving(large, ssl_context=tls.server, limits=limits) as server:
            client = await asyncio.to_thread(tls.connected_socket, server)
            with client:
                client.sendall(get())
                begin_s, got = time.monotonic(), 0
                while got < LARGE_BYTES:
                    piece = await asyncio.to_thread(client.recv, 16 << 10)
                    assert piece, f"the connection was cut after {got} bytes"
                    got += piece.count(b"\0")
                    await asyncio.sleep(0.005)
                assert time.monotonic() - begin_s > 2 * limits.unread_s

    run(slow())


def test_client_that_reads_nothing_is_dropped(run: Callable[[Coroutine[Any, Any, None]], None], tls: Tls) -> None:
    async def unread() -> None:
        limits = replace(SHORT, head_s=60.0, keep_alive_s=60.0, unread_s=0.5)
        async with serving(large, ssl_context=tls.server, limits=limits) as server:
            client = await asyncio.to_thread(tls.connected_socket, server)
            with client:
                client.sendall(get())
                await nothing_open(server)

    run(unread())


async def test_new_certificate_holds_for_new_connections_and_drops_none(tmp_path: Path) -> None:
    old, new = certificate(tmp_path, "old"), certificate(tmp_path, "new")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*old)
    trusting = ssl.create_default_context(cafile=str(old[0]))
    trusting.load_verify_locations(str(new[0]))

    async with serving(echo, ssl_context=context) as server:

        async def connect() -> Client:
            return Client(*await asyncio.open_connection("127.0.0.1", server.port, ssl=trusting))

        def subject(client: Client) -> str:
            return str(client.writer.get_extra_info("peercert")["subject"][0][0][1])

        first = await connect()
        assert subject(first) == "old"
        context.load_cert_chain(*new)
        second = await connect()
        assert subject(second) == "new"
        for client in (first, second):
            client.send(post(b"{}"))
            assert (await client.response())[0] == 200
            await client.close()
