"""Hand-written HTTP/2 frames, which no gRPC library would send."""

import socket
import struct
from collections.abc import Mapping

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, CONTINUATION = 0, 1, 3, 4, 6, 9
ACK, END_STREAM, END_HEADERS = 1, 1, 4
CANCEL = 8
READ_BYTES = 1 << 16
SEND_TIMEOUT_S = 1.0


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def request_headers(path: str, more: Mapping[str, str] | None = None) -> bytes:
    """Header block of a gRPC call. Its literals are not indexed, so that every stream can send the same block."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "router",
        "te": "trailers",
        "content-type": "application/grpc",
        **(more or {}),
    }
    return b"".join(header(name, value) for name, value in fields.items())


def header(name: str, value: str) -> bytes:
    """A header field. Name and value must be shorter than 127 bytes each."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


def grpc_message(message: bytes) -> bytes:
    """A message as it is framed in a stream: uncompressed, with its length."""
    return struct.pack(">BI", 0, len(message)) + message


class Connection:
    """A connection that sends as fast as the server reads, and never extends the flow-control window for answers."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.sendall(PREFACE + frame(SETTINGS, 0, 0))
        self._next_stream = 1
        self._is_settled = False
        self.opened = 0

    def open_streams(
        self, count: int, headers: bytes, *, body: bytes | None = None, ends: bool = False, reset: bool = False
    ) -> bool:
        """Opens streams. Each sends `body`, if any, and then ends (`ends`), is cancelled (`reset`) or stays open.

        Returns False if the server no longer reads."""
        data = bytearray()
        for _ in range(count):
            data += frame(HEADERS, END_HEADERS, self._next_stream, headers)
            if body is not None:
                data += frame(DATA, END_STREAM if ends else 0, self._next_stream, body)
            if reset:
                data += frame(RST_STREAM, 0, self._next_stream, struct.pack(">I", CANCEL))
            self._next_stream += 2
        if not self.send(data):
            return False
        self.opened += count
        return True

    def reset_last(self, count: int) -> bool:
        """Cancels the `count` streams opened last. Returns False if the server no longer reads."""
        streams = range(self._next_stream - 2 * count, self._next_stream, 2)
        return self.send(b"".join(frame(RST_STREAM, 0, stream, struct.pack(">I", CANCEL)) for stream in streams))

    def send(self, data: bytes | bytearray) -> bool:
        """Returns False if the server no longer reads."""
        try:
            self._acknowledge()
            self._socket.settimeout(SEND_TIMEOUT_S)
            self._socket.sendall(data)
        except OSError:  # closed, or the server has stopped reading
            return False
        return True

    def close(self) -> None:
        self._socket.close()

    def _acknowledge(self) -> None:
        """Reads what has arrived. Acknowledges the server's settings unread, since the server waits for that.

        Raises ConnectionError if the server has closed the connection."""
        self._socket.setblocking(False)
        try:
            while read := self._socket.recv(READ_BYTES):
                if read[3:4] == bytes([SETTINGS]) and not self._is_settled:
                    self._is_settled = True
                    self._socket.setblocking(True)
                    self._socket.sendall(frame(SETTINGS, ACK, 0))
                    self._socket.setblocking(False)
        except BlockingIOError:
            return
        raise ConnectionError("the server has closed the connection")
