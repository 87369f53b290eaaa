"""Output that a connection's client does not read."""

import asyncio
import fcntl
import sys
import termios


class UnreadOutput:
    """Tells for how long the client has read nothing, from looks at how much output waits for it."""

    __slots__ = ("_num_bytes", "_since_s")

    def __init__(self) -> None:
        self._num_bytes = 0  # at the last look
        self._since_s: float | None = None

    def has_been_read(self) -> None:
        """The client has read."""
        self._since_s = None

    def waited_s(self, num_bytes: int, now_s: float) -> float:
        """Returns the seconds since the first look at which output waited that the client has read nothing of.

        num_bytes: how much waits now. Only the client makes it less.
        """
        if self._since_s is None or num_bytes < self._num_bytes:
            self._since_s = now_s
        self._num_bytes = num_bytes
        return now_s - self._since_s


def unacknowledged_bytes(transport: asyncio.Transport) -> int:
    """Returns how many bytes the kernel holds that the client's kernel has not acknowledged. Linux tells; 0 elsewhere.

    The kernel takes output from the process in large pieces. If a client reads a little each second, the next piece may
    go only after minutes, but acknowledgements come every few seconds.
    """
    number = bytearray(4)
    try:
        fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, number)  # SIOCOUTQ
    except (OSError, ValueError):  # not supported, or the socket has been closed
        return 0
    return int.from_bytes(number, sys.byteorder)
