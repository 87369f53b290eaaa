"""The port of metrics answers scrapers, and neither slow nor hostile clients hold it up, or the event loop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.router.loop_work import watched_loop
from trunkline_runtime.server import PortInUse
from trunkline_runtime.telemetry import metrics_server
from trunkline_runtime.telemetry.exposition import Families
from trunkline_runtime.telemetry.metrics_server import MAX_CONNECTIONS, MetricsServer
from trunkline_runtime.telemetry.scrape_tokens import ScrapeTokenError, ScrapeTokens
from trunkline_runtime.telemetry.series import OTHER, BoundedNames, BucketCounts, gauge, one_two_five

TOKEN = b"0123456789abcdef-scraper"


class Source:
    """Counts how often it is asked."""

    def __init__(self, *families: Metric) -> None:
        self.asked = 0
        self._families = families or (gauge("g", "A gauge.", ("x",), [(("1",), 2.0)]),)

    async def collect(self) -> Families:
        self.asked += 1
        return iter(self._families)


@asynccontextmanager
async def served(source: Source, tokens: ScrapeTokens | None = None) -> AsyncIterator[MetricsServer]:
    server = MetricsServer(source.collect, tokens or ScrapeTokens([]))
    await server.start("127.0.0.1", 0)
    try:
        yield server
    finally:
        await server.stop()


async def ask(server: MetricsServer, head: bytes) -> bytes:
    """The whole answer to these bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(head)
    try:
        return await reader.read()
    finally:
        writer.close()


def get(path: bytes = b"/metrics", *headers: bytes, method: bytes = b"GET") -> bytes:
    return b"\r\n".join([method + b" " + path + b" HTTP/1.1", b"Host: x", *headers, b"", b""])


async def connected(server: MetricsServer, count: int) -> None:
    """Waits until this many connections are being served."""
    while len(server._serving) < count:  # noqa: ASYNC110  # nothing announces it
        await asyncio.sleep(0)


async def test_a_scraper_gets_the_metrics() -> None:
    async with served(Source()) as server:
        head, _, body = (await ask(server, get())).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\n")
    assert f"Content-Length: {len(body)}".encode() in head
    (family,) = text_string_to_metric_families(body.decode())
    assert (family.name, family.samples[0].value) == ("g", 2.0)


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (get(b"/"), 404),
        (get(b"/metrics/../x"), 404),
        (get(method=b"POST"), 405),
        (b"nonsense\r\n\r\n", 400),
        (b"GET /metrics HTTP/2\r\n\r\n", 400),
        (get(b"/metrics?name=x"), 200),
        (get(method=b"HEAD"), 200),
    ],
)
async def test_other_requests_get_their_status(request_bytes: bytes, status: int) -> None:
    async with served(Source()) as server:
        assert (await ask(server, request_bytes)).startswith(f"HTTP/1.1 {status} ".encode())


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        (b"Bearer " + TOKEN, 200),
        (b"bearer  " + TOKEN, 200),
        (b"Bearer " + TOKEN[:-1], 401),
        (b"Basic " + TOKEN, 401),
        (TOKEN, 401),
        (b"", 401),
    ],
)
async def test_with_tokens_only_their_bearers_may_scrape(authorization: bytes, status: int) -> None:
    async with served(Source(), ScrapeTokens([b"another-token-of-ours", TOKEN])) as server:
        answer = await ask(server, get(b"/metrics", b"Authorization: " + authorization))
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert (b"A gauge" in answer) == (status == 200)


def test_a_file_of_tokens_has_one_a_line(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_bytes(b"\n" + TOKEN + b"\r\n  another-token-of-ours \n")
    tokens = ScrapeTokens.read(str(file))
    assert tokens.allow(b"Bearer " + TOKEN)
    assert tokens.allow(b"Bearer another-token-of-ours")
    assert not tokens.allow(b"Bearer ")
    for content in (b"", b"\n", TOKEN + b"\nshort"):
        file.write_bytes(content)
        with pytest.raises(ScrapeTokenError, match="16 bytes or more") as raised:
            ScrapeTokens.read(str(file))
        assert TOKEN.decode() not in str(raised.value)
    with pytest.raises(ScrapeTokenError, match="No such file"):
        ScrapeTokens.read(str(tmp_path / "absent"))


async def test_many_scrapers_cost_no_more_than_one() -> None:
    source = Source()
    async with served(source) as server:
        answers = await asyncio.gather(*(ask(server, get()) for _ in range(MAX_CONNECTIONS // 2)))
        assert len(set(answers)) == 1
    assert source.asked == 1


async def test_slow_and_silent_clients_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "REQUEST_TIMEOUT_S", 0.05)
    async with served(Source()) as server:
        assert await ask(server, b"") == b""
        assert await ask(server, b"GET /metr") == b""


async def test_a_client_that_does_not_read_its_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "RESPONSE_TIMEOUT_S", 0.2)
    large = gauge("g", "A gauge.", ("x",), [((str(n) * 100,), 1.0) for n in range(40_000)])
    async with served(Source(large)) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
        writer.write(get())
        async with asyncio.timeout(60):
            await connected(server, 1)
            await asyncio.gather(*server._serving)
        assert not server._serving
        assert await reader.read(1), "the answer had begun"
        writer.transport.abort()


async def test_an_endless_header_is_cut_off() -> None:
    async with served(Source()) as server:
        assert await ask(server, b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 100_000) == b""
        assert (await ask(server, get())).startswith(b"HTTP/1.1 200 ")


async def test_connections_beyond_the_bound_are_closed_at_once() -> None:
    async with served(Source()) as server:
        silent = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(MAX_CONNECTIONS)]
        await connected(server, MAX_CONNECTIONS)
        with suppress(ConnectionError):
            assert await ask(server, get()) == b""
        for _, writer in silent:
            writer.transport.abort()
        await asyncio.gather(*server._serving)
        assert (await ask(server, get())).startswith(b"HTTP/1.1 200 ")


async def test_a_long_answer_does_not_hold_up_the_event_loop() -> None:
    families = [gauge(f"g{n}", "A gauge.", ("x",), [((str(k),), 1.0) for k in range(300)]) for n in range(300)]
    async with served(Source(*families)) as server:
        async with watched_loop() as work:
            body = await ask(server, get())
        assert work.longest_s < 0.05, "seconds of CPU time: it takes 4 ms, and in one piece 200"
    assert body.count(b"\n") > 90_000


async def test_an_error_while_collecting_ends_one_answer_only(capsys: pytest.CaptureFixture[str]) -> None:
    source = Source()

    async def fail() -> Families:
        raise RuntimeError("a bug")

    async with served(source) as server:
        collect, server._fresh._collect = server._fresh._collect, fail
        assert await ask(server, get()) == b""
        server._fresh._collect = collect
        assert (await ask(server, get())).startswith(b"HTTP/1.1 200 ")
    assert "unexpected error" in "".join(capsys.readouterr())


async def test_a_taken_port_is_one_clear_line() -> None:
    async with served(Source()) as server:
        with pytest.raises(
            PortInUse, match=f"port {server.port} on 127.0.0.1 is in use; choose another with --metrics-"
        ):
            await MetricsServer(Source().collect, ScrapeTokens([])).start("127.0.0.1", server.port)


def test_buckets_count_as_prometheus_does() -> None:
    counts = BucketCounts((1.0, 2.0))
    for value, times in ((0.5, 1), (1.0, 2), (1.5, 1), (2.5, 3)):
        counts.add(value, times)
    assert counts.cumulative() == [("1.0", 3.0), ("2.0", 4.0), ("+Inf", 7.0)]
    assert (counts.count, counts.sum) == (7, 0.5 + 2.0 + 1.5 + 7.5)
    assert one_two_five(100) == (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
    assert one_two_five(99)[-1] == 50.0


def test_the_first_names_keep_their_labels() -> None:
    names = BoundedNames(2)
    assert [names.label(name) for name in ("a", "b", "c", "a", "d", "b")] == ["a", "b", OTHER, "a", OTHER, "b"]
