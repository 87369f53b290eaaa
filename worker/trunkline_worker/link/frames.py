"""Messages on the local socket between front and engine: 4-byte little-endian length, then a protobuf message."""

from google.protobuf.message import Message

LENGTH_BYTES = 4


def frame(message: Message) -> bytes:
    """The bytes of one message on the socket."""
    payload = message.SerializeToString()
    return len(payload).to_bytes(LENGTH_BYTES, "little") + payload


class FrameReader:
    """Assembles messages from the pieces that a socket returns."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Adds received bytes, and returns the payloads that are complete now."""
        buffer = self._buffer
        buffer += data
        payloads: list[bytes] = []
        start = 0
        while len(buffer) - start >= LENGTH_BYTES:
            end = start + LENGTH_BYTES + int.from_bytes(buffer[start : start + LENGTH_BYTES], "little")
            if len(buffer) < end:
                break
            payloads.append(bytes(buffer[start + LENGTH_BYTES : end]))
            start = end
        del buffer[:start]
        return payloads
