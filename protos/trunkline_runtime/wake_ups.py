"""The wake-ups that grpc.aio sends to the event loop, read all at once.

When an operation of gRPC's core ends, a thread of grpc.aio writes one byte to a socket, which wakes the event loop. The
event loop handles every operation that has ended by then, and reads one byte. After a burst it is therefore woken once
more for each of them, with two system calls each time and nothing to do. Where more bytes are unread than the socket
holds, which is a few hundred, the thread waits: then one operation a turn of the loop is all that gets through, and a
call may wait a tenth of a second before its server knows of it.
"""

import socket
from typing import Any

from grpc.aio import init_grpc_aio

READ_BYTES = 4096  # more than a socket holds of single bytes


class _ReadAtOnce(socket.socket):
    def recv(self, bufsize: int, flags: int = 0) -> bytes:
        """At least what is asked for, and all that is there."""
        return super().recv(max(bufsize, READ_BYTES), flags)


def read_wake_ups_at_once() -> bool:
    """Has grpc.aio read them so, for as long as the process lives. To be called on the event loop before anything else
    of grpc.aio, which makes its socket when it is first used. Returns whether it has been in time.
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
