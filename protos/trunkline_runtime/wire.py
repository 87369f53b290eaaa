"""Messages in the form in which they travel: what they are made of, without parsing them.

Parsing makes a message of a few bytes an entry many times larger, and cannot be interrupted. Fields that follow one
another are a message of the same type by themselves, so a long message can be parsed part by part.
The wire format: https://protobuf.dev/programming-guides/encoding
"""

from collections.abc import Iterator

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
VARINT_BYTES = 10  # at most


class NotAMessage(Exception):
    """The bytes are no protobuf message. One line for a person."""


def fields(raw: bytes, at: int = 0, end: int | None = None) -> Iterator[tuple[int, int, int, int]]:
    """The fields of the message at raw[at:end], in order: a field's number, and where it, its value and the next field
    begin. A value of variable length begins after its length. Raises NotAMessage."""
    if end is None:
        end = len(raw)
    while at < end:
        begin = at
        # Most tags and sizes are of one byte: without a call for each, this takes two thirds of the time.
        tag = raw[at]
        at += 1
        if tag > 127:
            tag, at = varint(raw, begin)
        wire = tag & 7
        value_at = at
        if wire == LENGTH:
            if at < end and (size := raw[at]) < 128:
                value_at = at + 1
            else:
                size, value_at = varint(raw, at)
            at = value_at + size
        elif wire == VARINT:
            _, at = varint(raw, at)
        elif wire in (FIXED32, FIXED64):
            at += 4 if wire == FIXED32 else 8
        else:
            raise NotAMessage(f"wire type {wire} at byte {begin}")
        if at > end:
            raise NotAMessage(f"the field at byte {begin} ends after its message")
        yield tag >> 3, begin, value_at, at


def parts(raw: bytes, most_bytes: int) -> Iterator[bytes]:
    """The same message in several, each of at most so many bytes or of a single field. Raises NotAMessage."""
    begin = at = 0
    for _, field_at, _, field_end in fields(raw):
        at = field_at
        if field_end - begin > most_bytes and begin < at:
            yield raw[begin:at]
            begin = at
    if begin < len(raw):
        yield raw[begin:]


def varint(raw: bytes, at: int) -> tuple[int, int]:
    """The number at raw[at], and where it ends. Raises NotAMessage."""
    try:
        byte = raw[at]
        if byte < 128:
            return byte, at + 1
        value, shift = byte & 127, 7
        for index in range(at + 1, at + VARINT_BYTES):
            byte = raw[index]
            value |= (byte & 127) << shift
            if byte < 128:
                return value, index + 1
            shift += 7
    except IndexError:
        pass
    raise NotAMessage(f"the number at byte {at} does not end")


def varint_bytes(number: int) -> bytes:
    """A number that is not negative, as it travels."""
    digits = bytearray()
    while number > 127:
        digits.append(number & 127 | 128)
        number >>= 7
    digits.append(number)
    return bytes(digits)
