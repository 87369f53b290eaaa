"""Lists of up to two million elements in bodies and answers, in pieces: each piece takes a millisecond or two."""

import asyncio
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from trunkline.status import invalid

PIECE = 1 << 14  # elements


class Pauses:
    """Lets other tasks run after each PIECE of elements, in one list or in many short ones."""

    def __init__(self) -> None:
        self._num_elements = 0  # since the last pause

    async def after(self, num_elements: int) -> None:
        """Counts elements that were looked at."""
        self._num_elements += num_elements
        if self._num_elements >= PIECE:
            self._num_elements = 0
            await asyncio.sleep(0)


async def packed(ids: list[Any], field: str, pauses: Pauses | None = None) -> "array[int]":
    """Returns the token ids of a list. Raises RequestRefused (INVALID_REQUEST) if an element is not an int32.

    pauses: those of all lists of the request, if there are several
    """
    made, pauses = array("i"), pauses or Pauses()
    for start in range(0, len(ids), PIECE):
        piece = ids[start : start + PIECE]
        if set(map(type, piece)) != {int}:  # true is an int, too
            wrong = next(index for index, item in enumerate(piece) if type(item) is not int)
            raise invalid(field, f"the element at index {start + wrong} is not a token id")
        try:
            made.extend(array("i", piece))
        except OverflowError:
            wrong_id = next(item for item in piece if not -(1 << 31) <= item < 1 << 31)
            raise invalid(field, f"token id {wrong_id} is out of range") from None
        await pauses.after(len(piece))
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


async def dismantled(value: "dict[str, Any] | list[Any]") -> None:
    """Empties a JSON value, and what it contains. Without that, Python would free its millions of objects at once."""
    stack, num_freed = [value], 0
    while stack:
        top = stack[-1]
        if isinstance(top, dict):
            top = list(top.values())
            stack.pop().clear()
            stack.append(top)
        piece = top[-PIECE:]
        del top[-PIECE:]
        if not top:
            stack.pop()
        stack += [item for item in piece if isinstance(item, list | dict)]
        num_freed += 1 + len(piece)
        if num_freed > PIECE:
            num_freed = 0
            del piece
            await asyncio.sleep(0)
