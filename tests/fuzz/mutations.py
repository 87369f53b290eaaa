"""Damages bytes. The same seed damages in the same way."""

from collections.abc import Sequence
from random import Random

MAX_BYTES = 1 << 17  # of a case, but for those that a long piece makes longer


def damaged(draw: Random, data: bytes, pieces: Sequence[bytes], others: Sequence[bytes]) -> bytes:
    """The bytes with some of them cut out, repeated, overwritten or moved, and pieces or parts of others put in."""
    for _ in range(draw.choice((1, 1, 2, 3, 6))):
        data = _damaged_once(draw, data, pieces, others)[:MAX_BYTES]
    return data


def _damaged_once(draw: Random, data: bytes, pieces: Sequence[bytes], others: Sequence[bytes]) -> bytes:
    at = draw.randint(0, len(data))
    end = min(len(data), at + draw.choice((1, 1, 2, 4, 16, 64, len(data))))
    kind = draw.randrange(7)
    if kind == 0:
        return data[:at] + data[end:]
    if kind == 1:
        return data[:end] + data[at:end] * draw.choice((1, 2, 20)) + data[end:]
    if kind == 2:
        return data[:at] + draw.randbytes(end - at if end - at <= 64 else 4) + data[end:]
    if kind == 3 and at < len(data):
        return data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]
    if kind == 4:
        other = draw.choice(others)
        return data[:at] + other[draw.randint(0, len(other)) :]
    return data[:at] + draw.choice(pieces) + data[end if kind == 5 else at :]
