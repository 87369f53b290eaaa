"""Sends bytes over a connection of its own, and takes what comes back."""

import contextlib
import select
import socket
from collections.abc import Sequence

from tests.fuzz.target import GOOD_S

QUIET_S = 0.004  # after which a server that has said something, or nothing, is taken to have said all
MAX_ANSWER_BYTES = 4 << 20


def exchanged(port: int, writes: Sequence[bytes], *, patience_s: float = QUIET_S) -> bytes:
    """Sends the writes, and returns what the server sends until it closes or is quiet. Closes the connection."""
    got = bytearray()
    with socket.create_connection(("127.0.0.1", port), timeout=GOOD_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(ConnectionError):  # the server has refused what came first
            for number, data in enumerate(writes):
                connection.sendall(data)
                _take(connection, got, patience_s if number == len(writes) - 1 else 0.0)
    return bytes(got)


def _take(connection: socket.socket, got: bytearray, quiet_s: float) -> None:
    while len(got) < MAX_ANSWER_BYTES and select.select([connection], [], [], quiet_s)[0]:
        more = connection.recv(1 << 16)
        if not more:
            return
        got += more
