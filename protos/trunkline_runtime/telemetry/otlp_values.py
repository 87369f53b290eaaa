"""Writes OTLP's attributes and values as bytes. Most attributes are the same in all requests: their bytes are kept.

https://github.com/open-telemetry/opentelemetry-proto/blob/main/opentelemetry/proto/common/v1/common.proto; the wire
format: https://protobuf.dev/programming-guides/encoding
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from struct import Struct

from trunkline_runtime.wire import varint_bytes

MOST_KEPT = 4096  # attributes, and as many keys
MOST_KEPT_CHARACTERS, MOST_KEPT_INT = 64, 127  # of values that are kept
LEAST_INT, MOST_INT = -(1 << 63), (1 << 63) - 1

_UINT64 = (1 << 64) - 1
_double = Struct("<d").pack
_SIZES = [varint_bytes(size) for size in range(2048)]


def attributes(tag: bytes, values: Mapping[str, object] | None) -> bytes:
    """The attributes, each as a field with this tag. What OTLP cannot hold is left out."""
    if not values:
        return b""
    written = []
    for key, value in values.items():
        kind = type(value)
        if kind is float:
            written.append(_before_double(key) + _double(value))
        elif isinstance(value, str):
            is_kept = len(value) <= MOST_KEPT_CHARACTERS
            written.append(_kept(key, value) if is_kept else _attribute(key, b"\x0a" + sized(_utf8(value))))
        elif kind is int and 0 <= value <= MOST_KEPT_INT:  # type: ignore[operator]  # the type is checked by identity
            written.append(_kept(key, value))
        elif (encoded := _value(value)) is not None:
            written.append(_attribute(key, encoded))
    return tag + tag.join(written) if written else b""


def unique(tag: bytes, key: str, value: str) -> bytes:
    """An attribute whose text does not come again, so its bytes are not kept."""
    return tag + _attribute(key, b"\x0a" + sized(_utf8(value)))


def text(tag: bytes, value: str | None) -> bytes:
    """A field; nothing for an empty text. What is no Unicode is replaced."""
    return tag + sized(_utf8(value)) if value else b""


def count(tag: bytes, number: int) -> bytes:
    """A field; nothing for zero."""
    return tag + varint_bytes(number) if number else b""


def sized(raw: bytes) -> bytes:
    """Bytes after their number: a field's value, without its tag."""
    size = len(raw)
    return (_SIZES[size] if size < len(_SIZES) else varint_bytes(size)) + raw


@lru_cache(MOST_KEPT, typed=True)
def _kept(key: str, value: object) -> bytes:
    """An attribute."""
    encoded = _value(value)
    assert encoded is not None
    return _attribute(key, encoded)


def _attribute(key: str, encoded: bytes) -> bytes:
    """An attribute with an AnyValue."""
    return sized(_key(key) + b"\x12" + sized(encoded))


@lru_cache(MOST_KEPT)
def _before_double(key: str) -> bytes:
    """An attribute whose value is a double, as far as that: eight more bytes follow."""
    start = _key(key) + b"\x12\x09\x21"
    return varint_bytes(len(start) + 8) + start


@lru_cache(MOST_KEPT)
def _key(key: str) -> bytes:
    return b"\x0a" + sized(_utf8(key))


def _value(value: object) -> bytes | None:
    """An AnyValue; None if there is none for this value."""
    if isinstance(value, float):
        return b"\x21" + _double(value)
    if isinstance(value, bool):
        return b"\x10\x01" if value else b"\x10\x00"
    if isinstance(value, int):
        return b"\x18" + varint_bytes(value & _UINT64) if LEAST_INT <= value <= MOST_INT else None
    if isinstance(value, str):
        return b"\x0a" + sized(_utf8(value))
    if isinstance(value, bytes):
        return b"\x3a" + sized(value)
    if isinstance(value, Sequence):
        parts = [part for each in value if (part := _value(each)) is not None]
        return b"\x2a" + sized(b"".join([b"\x0a" + sized(part) for part in parts]))
    return None


def _utf8(value: str) -> bytes:
    return value.encode(errors="replace")
