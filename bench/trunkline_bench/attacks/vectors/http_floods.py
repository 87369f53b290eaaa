"""Attacks on the HTTP port. Each counts statuses, connections or streams."""

import contextlib
import json
import select
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from random import Random
from typing import BinaryIO

from trunkline_bench.attacks.vectors.calls import MIB, TENANT, side_by_side
from trunkline_bench.servers.demo_model import DEMO_MODEL

CONNECT_TIMEOUT_S = 5.0
COOL_S = 0.01  # pause after a refused request
PAUSE_S = 0.005
AT_ONCE = 16
BATCH = 20  # requests that are cancelled together
UNREAD, SLOW = 200, 1000
LARGE_BYTES = 6 * MIB

Strike = Callable[[int, float, Counter[str]], None]  # (port, seconds, outcomes that it counts)


def post(body: bytes, path: str = "/v1/completions") -> bytes:
    lines = (
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"x-trunkline-tenant: {TENANT}",
    )
    return "\r\n".join((*lines, f"Content-Length: {len(body)}", "", "")).encode() + body


def completion(**fields: object) -> bytes:
    return post(json.dumps({"model": DEMO_MODEL.name, "prompt": "Once", "max_tokens": 1, **fields}).encode())


SMALL = completion()
LARGE = completion(prompt="The little dog ran to the park. " * (LARGE_BYTES // 32))
BLANKS = b" " * 3900
NUMBERS_AMONG_BLANKS = post(b'{"prompt":[%b""]}' % ((b"%b1%b," % (BLANKS, BLANKS) * 15 + b'"",') * 62))
MANY_NUMBERS = post(b'{"prompt":[%b300]}' % (b"300," * 290_000))  # nearly as many values as a body may have
LONG = completion(max_tokens=200, ignore_eos=True, stream=True)


def connected(port: int) -> socket.socket:
    """A connection. Raises OSError."""
    return socket.create_connection(("127.0.0.1", port), timeout=CONNECT_TIMEOUT_S)


def flood_of(
    draw: Callable[[Random], bytes], at_once: int, port: int, duration_s: float, outcomes: Counter[str]
) -> None:
    """Sends requests that are drawn, one after another on each of so many connections, and counts the statuses."""
    end_s, chance = time.monotonic() + duration_s, Random(0)

    def one_after_another() -> None:
        while time.monotonic() < end_s:
            with contextlib.suppress(OSError), connected(port) as connection, connection.makefile("rb") as answers:
                connection.settimeout(None)  # some answers take long
                while time.monotonic() < end_s:
                    connection.sendall(draw(chance))
                    status = _status(answers.readline())
                    outcomes[status] += 1
                    _read_rest(answers)
                    if status != "200":
                        time.sleep(COOL_S)

    side_by_side([one_after_another] * at_once)


def _read_rest(answers: BinaryIO) -> None:
    """Reads the headers and the body of an answer, which may come in chunks."""
    length, is_chunked = 0, False
    while line := answers.readline().strip().lower():
        if line.startswith(b"content-length:"):
            length = int(line.partition(b":")[2])
        is_chunked |= line.startswith(b"transfer-encoding:")
    answers.read(length)
    while is_chunked and (length := int(answers.readline(), 16)):
        answers.read(length + 2)
    if is_chunked:
        answers.readline()


def _status(line: bytes) -> str:
    if not line:
        raise ConnectionError("the server has closed the connection")
    return line.split()[1].decode()


def new_connections(port: int, duration_s: float, outcomes: Counter[str]) -> None:
    """Opens a connection for each request, and never reads the answer."""
    end_s = time.monotonic() + duration_s
    while time.monotonic() < end_s:
        with contextlib.suppress(OSError), connected(port) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            outcomes["connections"] += 1


def cancelled_requests(port: int, duration_s: float, outcomes: Counter[str]) -> None:
    """Sends whole requests for streams, and goes a few milliseconds later."""
    end_s = time.monotonic() + duration_s
    while time.monotonic() < end_s:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for _ in range(BATCH):
                stack.enter_context(connected(port)).sendall(LONG)
                outcomes["requests"] += 1
            time.sleep(PAUSE_S)


def unread_streams(model: str, port: int, duration_s: float, outcomes: Counter[str]) -> None:
    """Opens streams of a lot of output, and holds them without reading."""
    request = completion(model=model, prompt="x", n=16, max_tokens=900, logprobs=20, ignore_eos=True, stream=True)
    _held([request] * UNREAD, port, duration_s, outcomes)


def slow_headers(port: int, duration_s: float, outcomes: Counter[str]) -> None:
    """Opens connections whose requests never end, and sends a byte on each of them from time to time."""
    begun = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nA: "
    _held([begun] * (SLOW // 2) + [SMALL[:-5]] * (SLOW // 2), port, duration_s, outcomes, dribble=b"b")


def _held(requests: list[bytes], port: int, duration_s: float, outcomes: Counter[str], *, dribble: bytes = b"") -> None:
    end_s = time.monotonic() + duration_s
    with contextlib.ExitStack() as stack:
        opened = []
        for request in requests:
            with contextlib.suppress(OSError):
                connection = stack.enter_context(connected(port))
                connection.sendall(request)
                opened.append(connection)
                outcomes["connections"] += 1
            if time.monotonic() >= end_s:
                return
        while (left_s := end_s - time.monotonic()) > 0:
            if not dribble:
                time.sleep(left_s)
                continue
            for connection in opened:
                with contextlib.suppress(OSError):
                    connection.send(dribble)
            time.sleep(min(left_s, 1.0))
        outcomes["closed by the server"] += len(_readable(opened)) if dribble else 0


def _readable(connections: list[socket.socket]) -> list[int]:
    """Connections on which the server has said something, or that it has closed."""
    poll = select.poll()
    for connection in connections:
        poll.register(connection, select.POLLIN)
    return [fd for fd, _ in poll.poll(0)]


UNREAD_HTTP_STREAMS = "200 unread streams over HTTP"
SMALL_HTTP_REQUESTS = "small requests over HTTP"

HOLDING_HTTP: Mapping[str, Callable[[str], Strike]] = {
    UNREAD_HTTP_STREAMS: lambda model: partial(unread_streams, model),
    "1,000 slow requests over HTTP": lambda model: slow_headers,
}
HTTP_FLOODS: Mapping[str, Strike] = {
    SMALL_HTTP_REQUESTS: partial(flood_of, lambda _: SMALL, AT_ONCE),
    "bodies of 6 MiB over HTTP": partial(flood_of, lambda _: LARGE, AT_ONCE),
    "bodies of 7 MiB of numbers among blanks over HTTP": partial(flood_of, lambda _: NUMBERS_AMONG_BLANKS, AT_ONCE),
    "bodies of a million numbers over HTTP": partial(flood_of, lambda _: MANY_NUMBERS, AT_ONCE),
    "new connections over HTTP": new_connections,
    "cancelled requests over HTTP": cancelled_requests,
}
