"""Checks JSON before it becomes objects, which take up to a hundred times as much memory. Works in short steps."""

import asyncio
import re
from array import array
from itertools import accumulate

from trunkline.status import RequestRefused, invalid
from trunkline.validation import MAX_LOGIT_BIAS
from trunkline_router.prompts.chat_template import MAX_MESSAGES
from trunkline_router.request.steps import STEP_BYTES

MAX_DEPTH = 64
MAX_CONTAINERS = 16 * MAX_MESSAGES  # lists and objects; a message may have several parts and tool calls
MAX_STRINGS = 4 * MAX_CONTAINERS + 2 * MAX_LOGIT_BIAS  # names and values
MAX_VALUES = 2 << 20  # the most token ids that fit a request, and more

_HIGH, _LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_PAIR, _SURROGATE = re.compile(_HIGH + _LOW), re.compile(rb"\\u[dD][89a-fA-F]")
_UNFINISHED = re.compile(rb"(?:" + _HIGH + rb")?(?:\\(?:u[0-9a-fA-F]{0,3})?)?\Z")  # an escape or pair at the end
_LONGEST_UNFINISHED = 11
_CHANGE = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # of depth, as signed bytes
_NO_BRACKETS = bytes(set(range(256)) - set(b"[{]}"))


class _Shape:
    """The counts so far, and what the next step continues: whether a string is open, and how deep it is."""

    def __init__(self) -> None:
        self._containers = self._quotes = self._commas = self._depth = 0
        self._in_string = False
        self._unfinished = b""

    def add(self, step: bytes, *, is_last: bool) -> None:
        """Counts a step. Raises RequestRefused."""
        step = self._without_escapes(self._unfinished + step, is_last=is_last)
        self._quotes += step.count(b'"')
        if self._quotes > 2 * MAX_STRINGS:
            raise _too_many("strings", MAX_STRINGS)
        parts = step.split(b'"')
        outside = b"".join(parts[int(self._in_string) :: 2])
        self._in_string ^= len(parts) % 2 == 0
        brackets = outside.translate(None, _NO_BRACKETS)
        opening = brackets.count(b"[") + brackets.count(b"{")
        self._containers += opening
        self._commas += outside.count(b",")
        if self._containers > MAX_CONTAINERS:
            raise _too_many("lists and objects", MAX_CONTAINERS)
        if self._commas + self._containers > MAX_VALUES:
            raise _too_many("values", MAX_VALUES)
        changes = array("b", brackets.translate(_CHANGE))
        if self._depth + opening > MAX_DEPTH and max(accumulate(changes, initial=self._depth)) > MAX_DEPTH:
            raise invalid("body", f"is nested more than {MAX_DEPTH} deep")
        self._depth += sum(changes)

    def _without_escapes(self, step: bytes, *, is_last: bool) -> bytes:
        """The step without escaped quotes, so that every quote in it begins or ends a string."""
        self._unfinished = b""
        if b"\\" not in step:
            return step
        step = step.replace(b"\\\\", b"..")  # now each backslash begins an escape
        if not is_last:
            found = _UNFINISHED.search(step, max(0, len(step) - _LONGEST_UNFINISHED))
            assert found is not None  # it matches the empty text
            step, self._unfinished = step[: found.start()], step[found.start() :]
        if _SURROGATE.search(step) and _SURROGATE.search(_PAIR.sub(b"", step)):
            raise invalid("body", "has an escape that is half of a surrogate pair")
        return step.replace(b'\\"', b"..")


async def check_shape(raw: bytes) -> None:
    """Raises RequestRefused (INVALID_REQUEST) if JSON is nested too deeply, has too many values, or has escapes that
    are half a character. JSON that is malformed may pass."""
    shape = _Shape()
    for start in range(0, len(raw), STEP_BYTES):
        is_last = start + STEP_BYTES >= len(raw)
        shape.add(raw[start : start + STEP_BYTES], is_last=is_last)
        if not is_last:
            await asyncio.sleep(0)


def _too_many(what: str, most: int) -> RequestRefused:
    return invalid("body", f"has more than {most} {what}")
