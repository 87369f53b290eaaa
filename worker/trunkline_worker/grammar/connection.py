"""The engine's end of a socket to a process that may break: nothing waits for it."""

import socket
from collections import deque

from trunkline_worker.link.channel import FrameReader

RECEIVE_BYTES = 1 << 16  # Python allocates as much for each call


class Connection:
    """Sends and receives frames."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self.socket = end
        self._frames = FrameReader()
        # What is left to send, with the sockets that go with it: one send takes no more than one along.
        self._unsent: deque[tuple[bytearray, socket.socket | None]] = deque()

    @property
    def is_behind(self) -> bool:
        """Whether something could not be sent yet."""
        return bool(self._unsent)

    def send(self, data: bytes = b"", end: socket.socket | None = None) -> None:
        """Sends this and what is left of earlier calls. What the socket cannot take is left for the next call. That the
        other end is closed is found by receive().

        end: a socket that is handed over with the data, and closed here
        """
        if data:
            self._unsent.append((bytearray(data), end))
        try:
            while self._unsent:
                self._send_some()
        except BlockingIOError:
            pass
        except ConnectionError:
            self._forget_unsent()

    def _send_some(self) -> None:
        data, end = self._unsent[0]
        if end is None:
            del data[: self.socket.send(data)]
        else:
            del data[: socket.send_fds(self.socket, [data], [end.fileno()])]
            end.close()
            self._unsent[0] = data, None
        if not data:
            self._unsent.popleft()

    def _forget_unsent(self) -> None:
        for _, end in self._unsent:
            if end is not None:
                end.close()
        self._unsent.clear()

    def receive(self) -> list[bytes] | None:
        """The frames that have arrived; None once the other end is closed and nothing is left."""
        payloads: list[bytes] = []
        try:
            while data := self.socket.recv(RECEIVE_BYTES):
                payloads += self._frames.feed(data)
                if len(data) < RECEIVE_BYTES:
                    return payloads
        except BlockingIOError:
            return payloads
        except ConnectionError:
            pass
        return payloads or None

    def close(self) -> None:
        self.socket.close()
        self._forget_unsent()
