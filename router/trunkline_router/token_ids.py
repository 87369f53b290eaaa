"""Many token ids in a message, a piece at a time: other requests have their turn between two pieces."""

import asyncio
from array import array
from collections.abc import Sequence
from typing import Protocol

from trunkline.validation import validate_token_ids

PIECE = 1 << 14  # ids; one or two milliseconds


class Repeated(Protocol):
    """A message's field, as far as it is filled."""

    def extend(self, ids: Sequence[int], /) -> None: ...


async def read_ids(ids: Sequence[int], *, vocab_size: int, field: str) -> "array[int]":
    """The ids of a message. Raises RequestRefused (INVALID_REQUEST) where one is not of the vocabulary."""
    read = array("i")
    for start in range(0, len(ids), PIECE):
        piece = ids[start : start + PIECE]
        validate_token_ids(piece, vocab_size=vocab_size, field=field, first_index=start)
        read.extend(piece)
        if len(piece) == PIECE:
            await asyncio.sleep(0)
    return read


async def write_ids(ids: Sequence[int], to: Repeated) -> None:
    """Appends the ids to a message's field."""
    for start in range(0, len(ids), PIECE):
        piece = ids[start : start + PIECE]
        to.extend(piece)
        if len(piece) == PIECE:
            await asyncio.sleep(0)
