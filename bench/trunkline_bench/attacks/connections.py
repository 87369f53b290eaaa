"""What a client does with connections and streams rather than with messages. Each returns what it came to."""

import contextlib
import socket
import time
from collections import Counter

from trunkline.metadata import TENANT_KEY
from trunkline_bench.attacks.calls import TENANT
from trunkline_bench.attacks.frames import (
    CONTINUATION,
    HEADERS,
    PING,
    PREFACE,
    SETTINGS,
    Connection,
    frame,
    grpc_message,
    header,
    request_headers,
)

BATCH = 100  # streams that are opened in one write
STREAMS = 1_000  # that a server lets one connection have
FRAMES = 1_000  # in one write
CONTINUATION_BYTES = 16_000
PAUSE_S = 0.005
IDLE_CONNECTIONS = 5_000
CANCELLED_REQUESTS = 29_000
DEADLINES = ("1n", "99999999H")  # 1 ns, and 11,000 years


def headers_of(path: str, **more: str) -> bytes:
    return request_headers(path, {TENANT_KEY: TENANT, **more})


def rapid_reset(port: int, path: str, duration_s: float) -> Counter[str]:
    """Streams that are opened and cancelled at once, over as many connections as it takes, one at a time."""
    end_s, opened, headers = time.monotonic() + duration_s, 0, headers_of(path)
    while time.monotonic() < end_s:
        connection = Connection(port)
        while time.monotonic() < end_s and connection.open_streams(BATCH, headers, reset=True):
            pass
        opened += connection.opened
        connection.close()
    return Counter(streams=opened)


def half_open(port: int, path: str, count: int, duration_s: float) -> Counter[str]:
    """Streams of one connection that say nothing, held for that time."""
    return held(port, path, None, count, duration_s, per_connection=count)


def held(
    port: int, path: str, message: bytes | None, count: int, duration_s: float, *, ends: bool = False,
    per_connection: int = STREAMS, metadata: dict[str, str] | None = None,
) -> Counter[str]:  # fmt: skip
    """Streams that send a message, or none, and stay for that time; what they are answered is never read."""
    end_s, headers = time.monotonic() + duration_s, headers_of(path, **(metadata or {}))
    body = None if message is None else grpc_message(message)
    connections: list[Connection] = []
    opened = 0
    while opened < count and time.monotonic() < end_s:
        connection = Connection(port)
        connections.append(connection)
        wanted = min(per_connection, count - opened)
        while (left := min(BATCH, wanted - connection.opened)) and connection.open_streams(
            left, headers, body=body, ends=ends
        ):
            pass
        if not connection.opened:
            break
        opened += connection.opened
    time.sleep(max(0.0, end_s - time.monotonic()))
    for connection in connections:
        connection.close()
    return Counter(streams=opened)


def cancelled(port: int, path: str, message: bytes, duration_s: float) -> Counter[str]:
    """Whole requests, each cancelled a few milliseconds after it was sent."""
    end_s, opened = time.monotonic() + duration_s, 0
    headers, body = headers_of(path), grpc_message(message)
    while time.monotonic() < end_s and opened < CANCELLED_REQUESTS:
        connection = Connection(port)
        while time.monotonic() < end_s and connection.open_streams(BATCH, headers, body=body, ends=True):
            time.sleep(PAUSE_S)
            if opened + connection.opened >= CANCELLED_REQUESTS or not connection.reset_last(BATCH):
                break
        opened += connection.opened
        connection.close()
    return Counter(streams=opened)


def strange_deadlines(port: int, path: str, message: bytes, duration_s: float) -> Counter[str]:
    """Requests with the shortest and the longest deadline that can be said."""
    end_s, opened, body = time.monotonic() + duration_s, 0, grpc_message(message)
    while time.monotonic() < end_s:
        connection = Connection(port)
        for deadline in DEADLINES:
            connection.open_streams(10, headers_of(path, **{"grpc-timeout": deadline}), body=body, ends=True)
        time.sleep(10 * PAUSE_S)
        opened += connection.opened
        connection.close()
    return Counter(streams=opened)


def frame_flood(port: int, kind: int, payload: bytes, duration_s: float) -> Counter[str]:
    """Frames of a kind that each want an answer, as fast as the socket takes them."""
    end_s, sent, connections = time.monotonic() + duration_s, 0, 0
    data = frame(kind, 0, 0, payload) * FRAMES
    while time.monotonic() < end_s:
        connection = Connection(port)
        connections += 1
        while time.monotonic() < end_s and connection.send(data):
            sent += FRAMES
        connection.close()
    return Counter(frames=sent, connections=connections)


def ping_flood(port: int, duration_s: float) -> Counter[str]:
    return frame_flood(port, PING, bytes(8), duration_s)


def settings_flood(port: int, duration_s: float) -> Counter[str]:
    return frame_flood(port, SETTINGS, b"", duration_s)


def continuation_flood(port: int, path: str, duration_s: float) -> Counter[str]:
    """Header blocks that never end."""
    end_s, sent, connections = time.monotonic() + duration_s, 0, 0
    more = frame(CONTINUATION, 0, 1, header("x", "y" * 120) * (CONTINUATION_BYTES // 124))
    while time.monotonic() < end_s:
        connection = Connection(port)
        connections += 1
        listens = connection.send(frame(HEADERS, 0, 1, headers_of(path)))
        while listens and time.monotonic() < end_s:
            listens = connection.send(more)
            sent += 1
        connection.close()
    return Counter(frames=sent, connections=connections)


def idle_connections(port: int, count: int, duration_s: float) -> Counter[str]:
    """Connections that say hello and then nothing."""
    end_s = time.monotonic() + duration_s
    with contextlib.ExitStack() as stack:
        opened = 0
        while opened < count and time.monotonic() < end_s:
            try:
                connection = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            except OSError:  # no more are taken
                break
            connection.sendall(PREFACE + frame(SETTINGS, 0, 0))
            opened += 1
        time.sleep(max(0.0, end_s - time.monotonic()))
    return Counter(connections=opened)
