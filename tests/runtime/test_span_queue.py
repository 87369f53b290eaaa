"""Spans are exported in the background; a collector that is down, silent or hostile costs nothing but a count."""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanContext

from tests.runtime.otlp_receiver import GRPC, HTTP, receiving
from trunkline_runtime.telemetry.bounded_session import MAX_ANSWER_BYTES
from trunkline_runtime.telemetry.otlp_exporter import TRACES, exporter_of
from trunkline_runtime.telemetry.span_queue import SpanQueue
from trunkline_runtime.tracing import SCOPE

PATIENCE_S = 60.0


SOURCE = Resource.create()


def span(source: Resource, name: str = "a span") -> ReadableSpan:
    context = SpanContext(1, 2, is_remote=False)
    return ReadableSpan(name, context, resource=source, start_time=1, end_time=2, instrumentation_scope=SCOPE)


def one(source: Resource) -> tuple[ReadableSpan, ...]:
    return (span(source),)


def wait_until(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until_s
        threading.Event().wait(0.005)


class HeldExporter(SpanExporter):
    """Exports nothing until it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.has_begun = threading.Event()
        self.num_sent = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.has_begun.set()
        assert self.go.wait(PATIENCE_S)
        self.num_sent += len(spans)
        return SpanExportResult.SUCCESS


def test_while_an_export_waits_spans_are_queued_up_to_a_bound_and_then_counted() -> None:
    exporter = HeldExporter()
    queue = SpanQueue(exporter, SOURCE, max_waiting=10, interval_s=0.005)
    queue.put(one)
    assert exporter.has_begun.wait(PATIENCE_S)
    for _ in range(15):
        queue.put(lambda source: (span(source), span(source)))
    assert queue.counts.dropped == 5
    exporter.go.set()
    queue.close()
    assert exporter.num_sent == queue.counts.exported == 1 + 2 * 10
    queue.put(one)
    assert queue.counts.dropped == 6, "it has ended"


def test_a_bug_in_making_spans_costs_those_alone() -> None:
    exporter = HeldExporter()
    exporter.go.set()
    queue = SpanQueue(exporter, SOURCE, interval_s=0.005)

    def fails(_: Resource) -> Sequence[ReadableSpan]:
        raise KeyError("a bug")

    for spans in (fails, one):
        queue.put(spans)
    queue.close()
    assert (queue.counts.dropped, queue.counts.exported) == (1, 1)


def test_a_full_batch_does_not_wait() -> None:
    exporter = HeldExporter()
    exporter.go.set()
    queue = SpanQueue(exporter, SOURCE, interval_s=PATIENCE_S, batch_spans=7)
    for _ in range(7):
        queue.put(one)
    wait_until(lambda: queue.counts.exported == 7)
    queue.close()


def test_a_full_queue_does_not_wait_for_a_larger_batch() -> None:
    exporter = HeldExporter()
    exporter.go.set()
    queue = SpanQueue(exporter, SOURCE, max_waiting=3, interval_s=PATIENCE_S, batch_spans=7)
    for _ in range(3):
        queue.put(one)
    wait_until(lambda: queue.counts.exported == 3)
    queue.close()


@contextmanager
def answering(answer: Callable[[socket.socket], None] | None) -> Iterator[int]:
    """The port of a server that gives each connection this answer; None: nothing listens there."""
    server = socket.create_server(("127.0.0.1", 0))
    port: int = server.getsockname()[1]
    if answer is None:
        server.close()
        yield port
        return

    def serve(connection: socket.socket) -> None:
        with connection:
            try:
                connection.recv(1 << 16)
                answer(connection)
            except OSError:
                pass  # the exporter has hung up

    def accept() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield port
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join()


def silence(connection: socket.socket) -> None:
    while connection.recv(1 << 16):
        pass


def garbage(connection: socket.socket) -> None:
    connection.sendall(b"\x00\xff garbage \r\n\r\n" * 100)


def endless(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 500 Oops\r\ntransfer-encoding: chunked\r\n\r\n")
    while True:
        connection.sendall(b"10000\r\n" + b"x" * (1 << 16) + b"\r\n")


def elsewhere(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 404 Not Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n")


def to_a_login(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/login\r\ncontent-length: 0\r\n\r\n")


@pytest.mark.parametrize("protocol", [GRPC, HTTP])
@pytest.mark.parametrize("answer", [None, silence, garbage, endless, elsewhere, to_a_login])
def test_a_collector_that_takes_nothing_costs_a_count(
    monkeypatch: pytest.MonkeyPatch, protocol: str, answer: Callable[[socket.socket], None] | None
) -> None:
    with answering(answer) as port:
        queue = queue_to(monkeypatch, protocol, port, timeout_s=0.3)
        queue.put(one)
        wait_until(lambda: queue.counts.failed == 1)
        queue.close()
    assert queue.counts.exported == 0


def queue_to(monkeypatch: pytest.MonkeyPatch, protocol: str, port: int, timeout_s: float = PATIENCE_S) -> SpanQueue:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", str(timeout_s))
    exporter = exporter_of(TRACES)
    assert exporter is not None
    return SpanQueue(exporter, SOURCE, interval_s=0.005)


@pytest.mark.parametrize("protocol", [GRPC, HTTP])
def test_a_span_that_otlp_cannot_hold_does_not_lose_the_others(monkeypatch: pytest.MonkeyPatch, protocol: str) -> None:
    def strange(source: Resource) -> tuple[ReadableSpan, ...]:
        values: dict[str, str | int] = {"text": "a\ud800", "number": 1 << 63, "key": "value"}
        return (ReadableSpan("strange", SpanContext(1, 3, is_remote=False), resource=source, attributes=values),)

    with receiving() as receiver:
        queue = queue_to(monkeypatch, protocol, receiver.ports[protocol])
        for spans in (one, strange):
            queue.put(spans)
        queue.close()
    assert [each.name for each in receiver.spans] == ["a span", "strange"]
    assert receiver.spans[1].attributes == {"key": "value"}


def test_of_an_endless_answer_little_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = 0

    def pours(connection: socket.socket) -> None:
        nonlocal sent
        connection.sendall(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n")
        while True:
            sent += connection.send(b"x" * 4096)

    with answering(pours) as port:
        queue = queue_to(monkeypatch, HTTP, port)
        queue.put(one)
        wait_until(lambda: queue.counts.exported == 1)
        queue.close()
    assert sent < MAX_ANSWER_BYTES + (16 << 20), "what the system's own buffers hold"


def test_a_process_ends_although_its_collector_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(silence) as port:
        queue = queue_to(monkeypatch, GRPC, port, timeout_s=1000.0)
        queue.put(one)
        begun_s = time.monotonic()
        queue.close(within_s=0.05)
        assert time.monotonic() - begun_s < PATIENCE_S


@pytest.mark.parametrize("protocol", [GRPC, HTTP])
def test_a_collector_gets_the_spans_in_order(monkeypatch: pytest.MonkeyPatch, protocol: str) -> None:
    with receiving() as receiver:
        queue = queue_to(monkeypatch, protocol, receiver.ports[protocol])
        for name in ("first", "second"):
            queue.put(lambda source, name=name: (span(source, name),))  # type: ignore[misc]
        queue.close()
    assert [each.name for each in receiver.spans] == ["first", "second"]
