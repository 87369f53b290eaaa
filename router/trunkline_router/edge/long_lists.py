"""Lists of up to a million elements in bodies and answers, in pieces: each piece takes a millisecond or two."""

import asyncio
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from trunkline.status import invalid

PIECE = 1 << 14  # elements


async def packed(ids: list[Any], field: str) -> "array[int]":
    """Returns the token ids of a list. Raises RequestRefused (INVALID_REQUEST) if an element is not an int32."""
    made = array("i")
    for start in range(0, len(ids), PIECE):
        if start:
            await asyncio.sleep(0)
        piece = ids[start : start + PIECE]
        if set(map(type, piece)) != {int}:  # true is an int, too
            wrong = next(index for index, item in enumerate(piece) if type(item) is not int)
            raise invalid(field, f"the element at index {start + wrong} is not a token id")
        try:
            made.extend(array("i", piece))
        except OverflowError:
            wrong_id = next(item for item in piece if not -(1 << 31) <= item < 1 << 31)
            raise invalid(field, f"token id {wrong_id} is out of range") from None
    return made


async def json_list(numbers: Sequence[int], of: Callable[[int], str] | None = None) -> orjson.Fragment:
    """Returns numbers as JSON; `of`: texts that take their places."""
    parts = []
    for start in range(0, len(numbers), PIECE):
        piece = numbers[start : start + PIECE]
        parts.append(orjson.dumps(list(piece) if of is None else list(map(of, piece)))[1:-1])
        if start:
            await asyncio.sleep(0)
    return orjson.Fragment(b"[%b]" % b",".join(parts))
