"""HTTP/2 frames for the gRPC port: those of a real client, recorded, and what a broken one makes of them."""

import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from random import Random
from typing import Any

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from tests.fuzz.mutations import damaged
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.inference_pb2 import GenerateRequest, GrantRequest, ListModelsRequest, TokenizeRequest
from trunkline.v1.inference_pb2_grpc import InferenceServiceStub
from trunkline_bench.attacks.vectors.frames import (
    ACK,
    CONTINUATION,
    DATA,
    HEADERS,
    PING,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    frame,
    grpc_message,
    header,
    request_headers,
)

PRIORITY, PUSH_PROMISE, GOAWAY, WINDOW_UPDATE = 2, 5, 7, 8
HEAD_BYTES = 9
SETTLED = frame(SETTINGS, ACK, 0)
REQUEST = GenerateRequest(text="hi", sampling=SamplingParams(max_tokens=2))


def settings(*pairs: tuple[int, int]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", name, value) for name, value in pairs))


PIECES = (
    *(settings((1, 0)), settings((2, 2)), settings((3, 0)), settings((4, 2**31)), settings((4, 0)), settings((5, 1))),
    *(settings((6, 0)), settings((0xFFFF, 2**32 - 1)), frame(SETTINGS, ACK, 0, b"x"), frame(SETTINGS, 0, 1, b"")),
    *(frame(PING, 0, 0, bytes(8)), frame(PING, 0, 1, bytes(8)), frame(PING, 0, 0, b"1"), frame(PING, ACK, 0, bytes(8))),
    *(frame(WINDOW_UPDATE, 0, stream, struct.pack(">I", by)) for stream in (0, 1, 3) for by in (0, 1, 2**31 - 1,
        2**32 - 1)),
    *(frame(RST_STREAM, 0, stream, struct.pack(">I", code)) for stream in (0, 1, 3, 99) for code in (0, 8, 2**32 - 1)),
    *(frame(GOAWAY, 0, 0, bytes(8)), frame(GOAWAY, 0, 0, b"\xff" * 8 + b"why"), frame(GOAWAY, 0, 1, bytes(8))),
    *(frame(PRIORITY, 0, 1, bytes(5)), frame(PRIORITY, 0, 1, b"\0\0\0\1\0"), frame(PRIORITY, 0, 0, b"")),
    *(frame(PUSH_PROMISE, 4, 1, bytes(4)), frame(CONTINUATION, 4, 1, b""), frame(99, 255, 7, b"unknown")),
    *(frame(HEADERS, flags, stream, b"") for flags in (0, 1, 4, 5, 0x2D) for stream in (0, 1, 2, 2**31 - 1)),
    *(frame(DATA, flags, stream, body) for flags in (0, 1, 8, 9) for stream in (0, 1, 3, 2) for body in (b"", b"\xff",
        bytes(6))),
    frame(DATA, 1, 1, grpc_message(b"\xff" * 20)),
    frame(DATA, 1, 1, b"\0\xff\xff\xff\xff"),
    frame(DATA, 1, 1, b"\1\0\0\0\2{}"),
    frame(DATA, 0, 1, bytes(1 << 14)),
    *(frame(HEADERS, 4, 1, block) for block in (b"\x80", b"\xff" * 8, b"\x3f\xff\xff\xff\xff\x0f", b"\x40\x7f",
        b"\x00\x85a")),
    *(frame(HEADERS, 5, 5, request_headers(path)) for path in ("", "/", "/a/b", "/trunkline.v1.InferenceService/X")),
    *(frame(HEADERS, 4, 5, request_headers("/trunkline.v1.InferenceService/Generate", more)) for more in (
        {"grpc-timeout": "0n"}, {"grpc-timeout": "x"}, {"grpc-timeout": "99999999H"}, {"grpc-encoding": "gzip"},
        {"grpc-encoding": "x"}, {"content-type": "text/html"}, {"te": "x"}, {":method": "GET"}, {":method": ""},
        {"x-trunkline-tenant": "\x7f"}, {"a-bin": "!"}, {"authorization": "Bearer x"}, {"connection": "close"},
        {"A": "b"}, {":path": "x"}, {":late": "b"}, {"content-length": "5"}, {"traceparent": "00-x"})),
    frame(HEADERS, 0, 7, header("x", "y" * 120) * 100),
)  # fmt: skip


def frames_of(data: bytes) -> list[bytes]:
    """The frames of what a client has sent, after the preface."""
    assert data.startswith(PREFACE)
    found, at = [], len(PREFACE)
    while at < len(data):
        end = at + HEAD_BYTES + int.from_bytes(data[at : at + 3], "big")
        found.append(data[at:end])
        at = end
    return found


def recorded(port: int) -> list[list[bytes]]:
    """The frames that a real client sends, for calls of several kinds."""
    made = []
    for call in (_generate, _unary, _grant, _cancelled):
        with _recorder(port) as (address, sent):
            options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
            with closing(grpc.insecure_channel(address, options=options)) as channel:
                call(channel)
        made.append(frames_of(bytes(sent)))
    return made


def _generate(channel: grpc.Channel) -> None:
    stub: Any = InferenceServiceStub(channel)
    metadata = (("x-trunkline-tenant", "a"), ("x-trunkline-session", "s"))
    for _ in range(2):
        assert list(stub.Generate(REQUEST, metadata=metadata, timeout=60))


def _unary(channel: grpc.Channel) -> None:
    stub: Any = InferenceServiceStub(channel)
    stub.Tokenize(TokenizeRequest(text="hi"), timeout=60)
    stub.ListModels(ListModelsRequest(), timeout=60)
    HealthStub(channel).Check(HealthCheckRequest(service="liveness"), timeout=60)


def _grant(channel: grpc.Channel) -> None:
    stub: Any = InferenceServiceStub(channel)
    with suppress(grpc.RpcError):
        list(stub.Grant(iter([GrantRequest(request=REQUEST)]), timeout=60))


def _cancelled(channel: grpc.Channel) -> None:
    stub: Any = InferenceServiceStub(channel)
    call = stub.Generate(REQUEST, timeout=60)
    next(iter(call))
    call.cancel()


@contextmanager
def _recorder(port: int) -> Iterator[tuple[str, bytearray]]:
    """A proxy before the port for one connection: its address, and what the client sends through it."""
    sent = bytearray()
    listener = socket.create_server(("127.0.0.1", 0))

    def pump(source: socket.socket, sink: socket.socket, keep: bytearray | None) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if keep is not None:
                    keep += data
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)

    def serve() -> None:
        with suppress(OSError):
            client, _ = listener.accept()
            with client, socket.create_connection(("127.0.0.1", port)) as server:
                back = threading.Thread(target=pump, args=(server, client, None))
                back.start()
                pump(client, server, sent)
                back.join()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}", sent
    finally:
        thread.join(20)
        listener.close()


def case(seed: int, connections: Sequence[Sequence[bytes]]) -> list[bytes]:
    """What one connection sends, in one write or two."""
    draw = Random(seed)
    frames = list(draw.choice(connections))
    for _ in range(draw.choice((1, 1, 2, 3, 5))):
        _change_frames(draw, frames, connections)
    data = b"".join(frames)
    if draw.random() < 0.3:
        data = damaged(draw, data, PIECES, [b"".join(other) for other in connections])
    preface = PREFACE if draw.random() < 0.97 else damaged(draw, PREFACE, PIECES, [PREFACE])
    cut = draw.randint(0, len(data)) if draw.random() < 0.4 else len(data)
    return [part for part in (preface + data[:cut], data[cut:]) if part]


def _change_frames(draw: Random, frames: list[bytes], connections: Sequence[Sequence[bytes]]) -> None:
    at = draw.randint(0, len(frames))
    kind = draw.randrange(7)
    if kind == 0 and frames:
        del frames[min(at, len(frames) - 1)]
    elif kind == 1 and frames:
        frames.insert(at, draw.choice(frames))
    elif kind == 2:
        draw.shuffle(frames)
    elif kind == 3:
        frames.insert(at, draw.choice(draw.choice(connections)))
    elif kind == 4 and frames:
        index = min(at, len(frames) - 1)
        frames[index] = _with_another_head(draw, frames[index])
    else:
        frames.insert(at, draw.choice(PIECES))


def _with_another_head(draw: Random, one: bytes) -> bytes:
    """The frame with another type, flags, stream or length."""
    kind, flags, stream = struct.unpack(">BBI", one[3:HEAD_BYTES])
    which = draw.randrange(4)
    if which == 0:
        return frame(draw.randrange(12), flags, stream, one[HEAD_BYTES:])
    if which == 1:
        return frame(kind, flags ^ 1 << draw.randrange(8), stream, one[HEAD_BYTES:])
    if which == 2:
        return frame(kind, flags, draw.choice((0, 1, 2, 3, 5, 2**31 - 1, 2**32 - 1)), one[HEAD_BYTES:])
    length = draw.choice((0, 1, len(one), 1 << 14, (1 << 14) + 1, (1 << 24) - 1))
    return length.to_bytes(3, "big") + one[3:]
