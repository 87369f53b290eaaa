"""Keys of tokens from a URL: real HTTP and HTTPS servers, good ones and bad ones."""

import asyncio
import base64
import datetime
import gc
import ipaddress
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from structlog.testing import capture_logs

from tests.router.cluster import until
from tests.router.identity.issuer import NOW_UNIX_S, RULES, jwks, private_key, token
from trunkline.status import NO_WORKER, RequestRefused
from trunkline_router.access.identity import jwks as jwks_module
from trunkline_router.access.identity.bearer_token import BearerTokens
from trunkline_router.access.identity.jwks import (
    LEAST_REFRESH_S,
    MOST_AGE_S,
    MOST_ANSWER_BYTES,
    REFRESH_S,
    JwksUrl,
    place_of,
)

Reply = Callable[[BaseHTTPRequestHandler], None]


def sends(content: bytes, status: int = 200, **headers: str) -> Reply:
    def reply(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | headers).items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(content)

    return reply


class JwksServer:
    """An HTTP server on a free port. `reply` is how it answers, `asked` how often it was."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        outer = self
        self.asked = 0
        self.reply: Reply = sends(jwks("ed25519"))
        self.ended = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked += 1
                outer.reply(self)

            def log_message(self, format: str, *args: Any) -> None:
                """Keeps the tests' output free of it."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: Any, address: Any) -> None:
                """Clients of these tests leave in the middle."""

        self._server = Server(("127.0.0.1", 0), Handler)
        if context is not None:
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.url = f"{'http' if context is None else 'https'}://127.0.0.1:{self._server.server_port}/jwks.json"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def serving(context: ssl.SSLContext | None = None) -> Iterator[JwksServer]:
    server = JwksServer(context)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def server() -> Iterator[JwksServer]:
    with serving() as server:
        yield server


def server_context(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """Of an HTTPS server that this process trusts."""
    files = certificate(folder, "known")
    monkeypatch.setenv("SSL_CERT_FILE", str(files[0]))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*files)
    return context


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def tokens_of(source: JwksUrl) -> BearerTokens:
    return BearerTokens(source, RULES, lambda: NOW_UNIX_S)


def accepts(source: JwksUrl, **signed: Any) -> bool:
    try:
        tokens_of(source).identify(token(**signed))
    except RequestRefused:
        return False
    return True


async def test_tokens_count_once_the_keys_are_fetched(server: JwksServer) -> None:
    source = JwksUrl(server.url)
    with pytest.raises(RequestRefused) as caught:
        tokens_of(source).identify(token())
    assert (caught.value.reason, caught.value.retry_delay_ms) == (NO_WORKER, 1000)  # not called wrong: not checked yet
    await source.start()
    assert accepts(source)


async def test_keys_that_have_not_changed_keep_what_is_cached(server: JwksServer) -> None:
    source = JwksUrl(server.url)
    await source.refresh()
    before = source.keys
    await source.refresh()
    assert source.keys is before
    server.reply = sends(jwks("ed25519", "p256"))
    await source.refresh()
    assert source.keys is not before
    assert accepts(source, algorithm="ES256")


async def test_an_unknown_key_is_fetched_soon_but_not_more_often_than_the_least_time(
    server: JwksServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert LEAST_REFRESH_S >= 10
    waits: list[float] = []
    real_sleep = asyncio.sleep

    async def sleep(delay_s: float) -> None:
        if delay_s >= 1:  # the source's, not this test's own
            waits.append(delay_s)
        await real_sleep(0.001)

    clock = Clock()
    source = JwksUrl(server.url, steady_s=clock)
    await source.start()
    server.reply = sends(jwks("ed25519", "p256"))
    monkeypatch.setattr(asyncio, "sleep", sleep)
    running = asyncio.create_task(source.run())
    for _ in range(500):
        accepts(source, kid="random")
    assert not accepts(source, algorithm="ES256")
    await until(lambda: accepts(source, algorithm="ES256"))
    await until(lambda: len(waits) >= 2)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert not source._asked.is_set(), "those that asked while the keys were fetched have them now"
    assert server.asked == 2
    assert waits == [LEAST_REFRESH_S, LEAST_REFRESH_S]


async def test_keys_are_fetched_from_time_to_time(server: JwksServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert REFRESH_S <= 600
    monkeypatch.setattr(jwks_module, "LEAST_REFRESH_S", 0.001)
    monkeypatch.setattr(jwks_module, "REFRESH_S", 0.002)
    source = JwksUrl(server.url)
    running = asyncio.create_task(source.run())
    await until(lambda: server.asked > 3)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def no_http(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"\x00\xff" * 100)


BAD: dict[str, Reply] = {
    "status": sends(b"x", 500),
    "not found": sends(jwks("p256"), 404),
    "redirect": sends(b"", 302, Location="http://127.0.0.1:1/"),
    "not JSON": sends(b"<html>"),
    "no keys": sends(b'{"keys": []}'),
    "huge": sends(b" " * (MOST_ANSWER_BYTES + 1)),
    "cut": sends(b'{"keys"', 200, **{"Content-Length": "1000000"}),
    "no HTTP": no_http,
    "nothing": lambda handler: None,
    "204": sends(b"", 204),
}


@pytest.mark.parametrize("bad", BAD)
async def test_a_failing_server_keeps_the_last_keys_up_to_their_age(server: JwksServer, bad: str) -> None:
    clock = Clock()
    source = JwksUrl(server.url, steady_s=clock)
    await source.start()
    server.reply = BAD[bad]
    with capture_logs() as logs:
        for _ in range(2):
            await source.refresh()
        clock.now_s += MOST_AGE_S
        await source.refresh()
        assert accepts(source)
        clock.now_s += 1
        await source.refresh()
        assert not accepts(source)
        server.reply = sends(jwks("ed25519"))
        await source.refresh()
    assert accepts(source)
    assert [entry["log_level"] for entry in logs] == ["error", "error", "info"]
    assert all("\n" not in str(entry.get("problem")) for entry in logs)


def dripping(server: JwksServer, start: bytes, again: bytes) -> Reply:
    """Sends something from time to time, and never comes to an end."""

    def reply(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(start)
        while not server.ended.wait(0.005):
            handler.wfile.write(again)

    return reply


ENDLESS = {
    "one header": (b"HTTP/1.1 200 OK\r\n", b"X"),
    "informational answers": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "a status line": (b"HTTP/1.1 200 O", b"K"),
}


@pytest.mark.parametrize("secure", [False, True], ids=["http", "https"])
@pytest.mark.parametrize("endless", ENDLESS)
async def test_an_answer_without_an_end_is_given_up_and_the_next_one_counts(
    endless: str, secure: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jwks_module, "FETCH_S", 0.3)
    context = server_context(tmp_path, monkeypatch) if secure else None
    with serving(context) as server:
        server.reply = dripping(server, *ENDLESS[endless])
        source = JwksUrl(server.url)
        with capture_logs() as logs:
            for _ in range(2):
                await source.refresh()
                assert source._fetching is not None
                await asyncio.wait((source._fetching,), timeout=60)
                assert source._fetching.done(), "it leaves no thread behind"
            server.reply = sends(jwks("ed25519"))
            monkeypatch.setattr(jwks_module, "FETCH_S", 20)
            await source.refresh()
        assert accepts(source)
        assert server.asked == 3
    assert [entry.get("problem") for entry in logs] == ["no answer in time", None]


REDIRECTS = (301, 302, 303, 307, 308)


@pytest.mark.parametrize("status", REDIRECTS)
async def test_a_redirect_is_not_followed(server: JwksServer, status: int) -> None:
    """Not to another host, nor to plain HTTP: the keys there are good ones, and do not count."""
    with serving() as elsewhere:
        server.reply = sends(b"", status, Location=elsewhere.url)
        source = JwksUrl(server.url)
        with capture_logs() as logs:
            await source.start()
        assert not accepts(source)
        assert (server.asked, elsewhere.asked) == (1, 0)
        assert [entry["problem"] for entry in logs] == [f"HTTP status {status}"]
        source = JwksUrl(elsewhere.url)
        await source.start()
        assert accepts(source), "the keys there are good ones"


async def test_a_body_that_drips_ends(server: JwksServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jwks_module, "FETCH_S", 0.05)

    server.reply = dripping(server, b"HTTP/1.1 200 OK\r\n\r\n", b" ")
    source = JwksUrl(server.url)
    await source.refresh()
    assert source._fetching is not None
    with pytest.raises(TimeoutError):
        await source._fetching


async def test_a_system_without_a_free_thread_ends_no_router(
    server: JwksServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = JwksUrl(server.url)
    await source.start()

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with capture_logs() as logs:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            await source.refresh()
        assert accepts(source)
        await source.refresh()
    assert [entry.get("problem") for entry in logs] == ["can't start new thread", None]


async def test_an_unreachable_server_does_not_stop_the_start(server: JwksServer) -> None:
    server.close()
    source = JwksUrl(server.url)
    with capture_logs() as logs:
        await source.start()
    assert [entry["log_level"] for entry in logs] == ["error"]


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1, and its key."""
    key = private_key(f"p256-{name}")
    issued = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    number, ends = x509.random_serial_number(), now + datetime.timedelta(days=9)
    made = (
        x509.CertificateBuilder(issued, issued, key.public_key(), number, now, ends)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    certificate_file, key_file = folder / f"{name}.pem", folder / f"{name}.key"
    certificate_file.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )  # fmt: skip
    return certificate_file, key_file


async def test_keys_come_over_https_from_a_server_that_a_known_authority_certifies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, other = certificate(tmp_path, "known"), certificate(tmp_path, "other")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*known)
    server = JwksServer(context)
    try:
        for authority, wanted in ((known, True), (other, False)):
            monkeypatch.setenv("SSL_CERT_FILE", str(authority[0]))
            source = JwksUrl(server.url)
            with capture_logs() as logs:
                await source.start()
            assert accepts(source) == wanted
            assert ("CERTIFICATE_VERIFY_FAILED" in str(logs)) != wanted
    finally:
        server.close()


def test_logs_do_not_show_what_may_be_secret_in_a_url() -> None:
    assert place_of("https://user:canary@host:8/path?key=canary#canary") == "https://host:8/path"


async def test_a_proxy_is_not_asked_for_keys_of_this_machine(
    server: JwksServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    source = JwksUrl(server.url)
    await source.start()
    assert accepts(source)


# http.client of Python 3.11.2, Debian's, leaves the socket of a refused tunnel to the garbage collector.
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore:unclosed <socket:ResourceWarning"
)
@pytest.mark.parametrize(
    ("credentials", "told"), [("", b""), ("me:p%40ss@", b"Proxy-Authorization: Basic " + base64.b64encode(b"me:p@ss"))]
)
async def test_keys_of_another_host_come_through_the_proxy_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, credentials: str, told: bytes
) -> None:
    asked: list[bytes] = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.extend((await reader.readuntil(b"\r\n\r\n")).split(b"\r\n"))
        writer.write(b"HTTP/1.1 403 Forbidden\r\n\r\n")
        writer.close()
        await writer.wait_closed()

    proxy = await asyncio.start_server(refuse, "127.0.0.1", 0)
    port = proxy.sockets[0].getsockname()[1]
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, f"http://{credentials}127.0.0.1:{port}")
    async with proxy:
        with capture_logs() as logs:
            await JwksUrl("https://issuer.invalid/jwks.json").start()
    assert asked[0].partition(b" HTTP/")[0] == b"CONNECT issuer.invalid:443"
    assert [line for line in asked if line.startswith(b"Proxy-")] == ([told] if told else [])
    assert [entry["problem"] for entry in logs] == ["Tunnel connection failed: 403 Forbidden"]
    gc.collect()


@pytest.mark.parametrize(
    ("none_for", "asked"),
    [
        ("issuer.invalid", "issuer.invalid"),
        ("issuer.invalid:8443", "issuer.invalid"),
        (".invalid", "issuer.invalid"),
        ("issuer.invalid:443", "proxy.invalid"),
        ("other.invalid", "proxy.invalid"),
    ],
)
def test_hosts_with_or_without_their_ports_can_be_left_out_of_the_proxy(
    monkeypatch: pytest.MonkeyPatch, none_for: str, asked: str
) -> None:
    for name in ("https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://proxy.invalid:3128")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, none_for)
    assert JwksUrl("https://issuer.invalid:8443/jwks.json")._connect().host == asked
