"""Spans are exported in the background; a collector that is down, silent or hostile costs nothing but a count."""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource

from tests.runtime.otlp_receiver import GRPC, HTTP, receiving
from trunkline_runtime.telemetry.bounded_session import MAX_ANSWER_BYTES
from trunkline_runtime.telemetry.otlp_spans import SpanSource, TraceWriter, unique_attribute
from trunkline_runtime.telemetry.span_queue import SpanQueue
from trunkline_runtime.telemetry.span_transports import span_transport
from trunkline_runtime.tracing import SCOPE

PATIENCE_S = 60.0


SOURCE = SpanSource(Resource.create(), SCOPE)


def span(name: str = "a span") -> bytes:
    return TraceWriter(1).span(name, 2, 0, 1, 2, [unique_attribute("trunkline.request_id", name)])


def wait_until(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until_s
        threading.Event().wait(0.005)


class HeldTransport:
    """Sends nothing until it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.has_begun = threading.Event()
        self.num_sent = 0

    def send(self, request: bytes, num_spans: int) -> bool:
        self.has_begun.set()
        assert self.go.wait(PATIENCE_S)
        (resource,) = ExportTraceServiceRequest.FromString(request).resource_spans
        (scope,) = resource.scope_spans
        assert len(scope.spans) == num_spans
        self.num_sent += num_spans
        return True

    def shutdown(self) -> None:
        pass


def test_while_an_export_waits_spans_are_queued_up_to_a_bound_and_then_counted() -> None:
    transport = HeldTransport()
    queue = SpanQueue(transport, SOURCE, max_waiting=10, interval_s=0.005)
    queue.put(lambda: (span(),))
    assert transport.has_begun.wait(PATIENCE_S)
    for _ in range(15):
        queue.put(lambda: (span(), span()))
    assert queue.counts.dropped == 5
    transport.go.set()
    queue.close()
    assert transport.num_sent == queue.counts.exported == 1 + 2 * 10
    queue.put(lambda: (span(),))
    assert queue.counts.dropped == 6, "it has ended"


def test_a_bug_in_making_spans_costs_those_alone() -> None:
    transport = HeldTransport()
    transport.go.set()
    queue = SpanQueue(transport, SOURCE, interval_s=0.005)

    def fails() -> Sequence[bytes]:
        raise KeyError("a bug")

    for spans in (fails, lambda: (span(),)):
        queue.put(spans)
    queue.close()
    assert (queue.counts.dropped, queue.counts.exported) == (1, 1)


def test_a_full_batch_does_not_wait() -> None:
    transport = HeldTransport()
    transport.go.set()
    queue = SpanQueue(transport, SOURCE, interval_s=PATIENCE_S, batch_spans=7)
    for _ in range(7):
        queue.put(lambda: (span(),))
    wait_until(lambda: queue.counts.exported == 7)
    queue.close()


def test_a_full_queue_does_not_wait_for_a_larger_batch() -> None:
    transport = HeldTransport()
    transport.go.set()
    queue = SpanQueue(transport, SOURCE, max_waiting=3, interval_s=PATIENCE_S, batch_spans=7)
    for _ in range(3):
        queue.put(lambda: (span(),))
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
        queue.put(lambda: (span(),))
        wait_until(lambda: queue.counts.failed == 1)
        queue.close()
    assert queue.counts.exported == 0


def queue_to(monkeypatch: pytest.MonkeyPatch, protocol: str, port: int, timeout_s: float = PATIENCE_S) -> SpanQueue:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", str(timeout_s))
    transport = span_transport()
    assert transport is not None
    return SpanQueue(transport, SOURCE, interval_s=0.005)


def test_of_an_endless_answer_little_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = 0

    def pours(connection: socket.socket) -> None:
        nonlocal sent
        connection.sendall(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n")
        while True:
            sent += connection.send(b"x" * 4096)

    with answering(pours) as port:
        queue = queue_to(monkeypatch, HTTP, port)
        queue.put(lambda: (span(),))
        wait_until(lambda: queue.counts.exported == 1)
        queue.close()
    assert sent < MAX_ANSWER_BYTES + (16 << 20), "what the system's own buffers hold"


def test_a_process_ends_although_its_collector_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(silence) as port:
        queue = queue_to(monkeypatch, GRPC, port, timeout_s=1000.0)
        queue.put(lambda: (span(),))
        begun_s = time.monotonic()
        queue.close(within_s=0.05)
        assert time.monotonic() - begun_s < PATIENCE_S


@pytest.mark.parametrize("protocol", [GRPC, HTTP])
def test_a_collector_gets_the_spans_in_order(monkeypatch: pytest.MonkeyPatch, protocol: str) -> None:
    with receiving() as receiver:
        queue = queue_to(monkeypatch, protocol, receiver.ports[protocol])
        for name in ("first", "second"):
            queue.put(lambda name=name: (span(name),))  # type: ignore[misc]
        queue.close()
    assert [each.name for each in receiver.spans] == ["first", "second"]
