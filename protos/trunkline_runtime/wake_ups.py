"""Reads all of grpc.aio's wake-ups of the event loop with one system call.

When an operation of gRPC's core ends, a thread of grpc.aio writes one byte to a socket, which wakes the event loop. The
event loop handles all operations that have ended by then, but reads only one byte. So after a burst it is woken again
for each operation, with two system calls each time and nothing to do. When the socket is full, at a few hundred unread
bytes, the thread blocks: then only one operation gets through in each turn of the loop, and a call may wait a tenth of
a second before its server sees it.
"""

import socket
from typing import Any

from grpc.aio import init_grpc_aio

READ_BYTES = 4096  # more than a socket holds of single bytes


class _ReadAtOnce(socket.socket):
    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        """Reads all bytes that are available, even beyond `bufsize`."""
        return super().recv(max(bufsize, READ_BYTES), flags)


def read_wake_ups_at_once() -> bool:
    """Makes grpc.aio read all wake-ups, for the life of the process. Call it on the event loop before any other use of
    grpc.aio, which creates its socket on first use. Returns False if the call came too late.
    """
    make_pair, has_made = socket.socketpair, False

    def pair(*arguments: Any, **named: Any) -> tuple[socket.socket, socket.socket]:
        nonlocal has_made
        has_made = True
        reading, writing = make_pair(*arguments, **named)
        family, kind, protocol = reading.family, reading.type, reading.proto
        return _ReadAtOnce(family, kind, protocol, fileno=reading.detach()), writing

    socket.socketpair = pair
    try:
        init_grpc_aio()
    finally:
        socket.socketpair = make_pair
    return has_made
