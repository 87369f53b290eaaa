"""A receiver of OpenTelemetry spans, over gRPC and HTTP on free ports, that keeps what it is sent."""

import gzip
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import ReadableSpan

PATIENCE_S = 60.0
GRPC, HTTP = "grpc", "http/protobuf"
# The names of the spans of requests over gRPC
GENERATE, GRANT = "trunkline.v1.InferenceService/Generate", "trunkline.v1.InferenceService/Grant"


@dataclass
class ReceivedSpan:
    """A span, and the service and its instance that sent it."""

    service: str
    instance: str
    proto: Span

    @property
    def name(self) -> str:
        return self.proto.name

    @property
    def id(self) -> str:
        return self.proto.span_id.hex()

    @property
    def parent_id(self) -> str:
        return self.proto.parent_span_id.hex()

    @property
    def attributes(self) -> dict[str, Any]:
        return attributes_of(self.proto.attributes)

    @property
    def events(self) -> list[tuple[str, dict[str, Any]]]:
        return [(event.name, attributes_of(event.attributes)) for event in self.proto.events]

    @property
    def links(self) -> list[str]:
        return [link.span_id.hex() for link in self.proto.links]

    @property
    def is_routers(self) -> bool:
        """Whether it is the router's own span of a request."""
        return self.service == "trunkline-router" and self.proto.kind == Span.SPAN_KIND_SERVER

    @property
    def is_error(self) -> bool:
        return self.proto.status.code == self.proto.status.STATUS_CODE_ERROR


def read(spans: Sequence[ReadableSpan]) -> list[ReceivedSpan]:
    """Spans that a router has made, and not sent."""
    encoded = encode_spans(spans).resource_spans
    return [ReceivedSpan("", "", span) for source in encoded for scope in source.scope_spans for span in scope.spans]


@dataclass
class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """`protocols`: over which something arrived."""

    ports: dict[str, int] = field(default_factory=dict)
    spans: list[ReceivedSpan] = field(default_factory=list)
    protocols: set[str] = field(default_factory=set)
    raw: bytes = b""
    arrived: threading.Condition = field(default_factory=threading.Condition)

    def environment(self, protocol: str = GRPC) -> dict[str, str]:
        """The variables with which a process exports its spans here, soon after they end."""
        return {
            "OTEL_TRACES_EXPORTER": "otlp",
            "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self.ports[protocol]}",
            "OTEL_BSP_SCHEDULE_DELAY": "20",
        }

    def take(self, raw: bytes, protocol: str) -> None:
        request = trace_service_pb2.ExportTraceServiceRequest.FromString(raw)
        with self.arrived:
            self.raw += raw
            self.protocols.add(protocol)
            for resource in request.resource_spans:
                told = attributes_of(resource.resource.attributes)
                service, instance = str(told["service.name"]), str(told.get("service.instance.id"))
                for scope in resource.scope_spans:
                    self.spans += [ReceivedSpan(service, instance, span) for span in scope.spans]
            self.arrived.notify_all()

    def Export(self, request: Any, _: Any) -> Any:
        self.take(request.SerializeToString(), GRPC)
        return trace_service_pb2.ExportTraceServiceResponse()

    def wait(self, request_id: str, is_complete: Callable[["Trace"], bool] = lambda _: True) -> "Trace":
        """Waits until the trace of a request is complete."""
        until_s = time.monotonic() + PATIENCE_S
        with self.arrived:
            while True:
                trace = self.trace(request_id)
                if trace is not None and is_complete(trace):
                    return trace
                assert self.arrived.wait(until_s - time.monotonic()), f"no complete trace of {request_id}: {trace}"

    def trace(self, request_id: str) -> "Trace | None":
        """The spans that have arrived; None if the router's own has not."""
        for span in self.spans:
            if span.is_routers and span.attributes.get("trunkline.request_id") == request_id:
                return Trace(span, [each for each in self.spans if each.proto.trace_id == span.proto.trace_id])
        return None


@dataclass
class Trace:
    """All spans of one trace that have arrived; `root` is the router's."""

    root: ReceivedSpan
    spans: list[ReceivedSpan]

    def named(self, name: str) -> list[ReceivedSpan]:
        found = [span for span in self.spans if span.name == name]
        return sorted(found, key=lambda span: span.proto.start_time_unix_nano)

    def one(self, name: str) -> ReceivedSpan:
        (span,) = self.named(name)
        return span

    def tree(self, span: ReceivedSpan | None = None) -> Any:
        """The names below a span, the router's by default: a name, or a name with the trees below it, by time."""
        top = span or self.root
        below = sorted(
            (each for each in self.spans if each.parent_id == top.id),
            key=lambda each: (each.proto.start_time_unix_nano, each.proto.end_time_unix_nano),
        )
        return (top.name, *(self.tree(each) for each in below)) if below else top.name


def attributes_of(pairs: Any) -> dict[str, Any]:
    def value_of(value: Any) -> Any:
        kind = value.WhichOneof("value")
        if kind == "array_value":
            return [value_of(each) for each in value.array_value.values]
        return getattr(value, kind)

    return {pair.key: value_of(pair.value) for pair in pairs}


@contextmanager
def receiving() -> Iterator[Receiver]:
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["content-length"]))
            receiver.take(gzip.decompress(body) if self.headers["content-encoding"] == "gzip" else body, HTTP)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = grpc.server(ThreadPoolExecutor(2))
    add_traces: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server  # without types
    add_traces(receiver, server)
    receiver.ports[GRPC] = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.daemon_threads = True
        receiver.ports[HTTP] = http.server_port
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield receiver
        finally:
            http.shutdown()
            thread.join()
            server.stop(None).wait()
