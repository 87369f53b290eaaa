"""Messages written by hand: what no library would make, or only with gigabytes of its own.

The wire format: https://protobuf.dev/programming-guides/encoding
"""

VARINT, LENGTH = 0, 2


def varint(value: int) -> bytes:
    data = bytearray()
    while value > 127:
        data.append(value & 127 | 128)
        value >>= 7
    data.append(value)
    return bytes(data)


def number(field: int, value: int) -> bytes:
    return varint(field << 3 | VARINT) + varint(value)


def nested(field: int, payload: bytes) -> bytes:
    """A string, bytes, a message or packed numbers."""
    return varint(field << 3 | LENGTH) + varint(len(payload)) + payload


def empty_entries(field: int, num_bytes: int) -> bytes:
    """As many empty entries of a repeated field as fit."""
    entry = nested(field, b"")
    return entry * (num_bytes // len(entry))
