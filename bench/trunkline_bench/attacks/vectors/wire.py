"""Hand-encoded protobuf messages, which a library would not encode, or only with gigabytes of memory.

Wire format: https://protobuf.dev/programming-guides/encoding
"""

from trunkline_runtime.wire import LENGTH, VARINT, varint_bytes


def number(field: int, value: int) -> bytes:
    return varint_bytes(field << 3 | VARINT) + varint_bytes(value)


def nested(field: int, payload: bytes) -> bytes:
    """A length-delimited field: a string, bytes, a message or packed numbers."""
    return varint_bytes(field << 3 | LENGTH) + varint_bytes(len(payload)) + payload


def empty_entries(field: int, num_bytes: int) -> bytes:
    """As many empty entries of a repeated field as fit in `num_bytes`."""
    entry = nested(field, b"")
    return entry * (num_bytes // len(entry))
