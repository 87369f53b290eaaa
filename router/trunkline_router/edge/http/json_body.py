"""JSON bodies: reads and parses those of requests, and writes long lists of answers.

The parser is jiter, pydantic's own: unlike orjson it finds names that an object has twice and keeps integers of more
than 64 bits, and it takes a fraction of the standard library's time. A byte of a text costs it a few nanoseconds. A
list costs up to 300, a name up to 900, and each takes tens of bytes of memory. So their numbers are bounded before the
body is parsed, and the parser needs no pauses. The costliest body, 8 MiB of escapes with as many names, lists and
digits as it may have, takes 0.1 s on a slow core.
"""

import asyncio
import time
from array import array
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

import jiter
import orjson

from trunkline.status import RequestRefused, invalid
from trunkline_router.prompts.conversation import MAX_MESSAGES

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

JSON_CONTENT_TYPE = "application/json"
MAX_DEPTH = 200  # jiter's limit, which cannot be set
MAX_CONTAINERS = 8 * MAX_MESSAGES  # lists and objects; a message may have several parts and tool calls
MAX_STRINGS = 12 * MAX_MESSAGES  # names and values; 1,700 calls of tools with reasoning, text and results in parts
STEP_BYTES = 256 << 10  # to copy, parse or decode this much takes a fraction of a millisecond
MAX_VALUES = 300_000  # a prompt of 256 Ki token ids, and 37,000 other values
PIECE = 1 << 14  # elements of a list that are written without a pause: a millisecond or two
MAX_DIGITS = 10 * MAX_VALUES  # outside of strings; long integers cost the most per byte, and a token id has at most ten
ALWAYS_WITHIN_BYTES = 2 * MAX_CONTAINERS  # a body up to this size is within all limits


async def read_body(receive: Receive) -> bytes:
    """The whole body. The server bounds size and time."""
    message = await receive()
    if not message["more_body"]:
        return bytes(message["body"])
    body = bytearray(message["body"])
    while message["more_body"]:
        message = await receive()
        body += message["body"]
    await give_way(len(body))
    return bytes(body)


def check_content_type(content_type: str) -> None:
    """Raises RequestRefused unless the body is said to be JSON. Pages of other origins may send other types to a server
    on the user's machine without asking it first.  content_type: without parameters, in lower case"""
    if content_type != JSON_CONTENT_TYPE:
        given = f"not {content_type!r}" if content_type else "which is missing"
        raise invalid("content-type", f"must be {JSON_CONTENT_TYPE}, {given}")


async def parse_object(raw: bytes, took_cpu_s: Callable[[float], object] = lambda _: None) -> dict[str, Any]:
    """The JSON object that a body is. Lets other tasks run before and after a long body is checked and parsed. Raises
    RequestRefused (INVALID_REQUEST).  took_cpu_s: is told for how long that held the event loop, also if the body is
    refused"""
    if not raw:
        raise invalid("body", "is empty")
    await give_way(len(raw))
    begun_s = time.thread_time()
    try:
        check_limits(raw)
        value = _parsed(raw)
    finally:
        took_cpu_s(time.thread_time() - begun_s)
    await give_way(len(raw))
    if not isinstance(value, dict):
        raise invalid("body", "is not a JSON object")
    return value


def check_limits(raw: bytes) -> None:
    """Raises RequestRefused (INVALID_REQUEST) if JSON has too many values. Malformed JSON may pass, but what comes
    before its first error is within the limits."""
    if len(raw) <= ALWAYS_WITHIN_BYTES:
        return
    if raw.count(b'"') <= 2 * MAX_STRINGS and _excess(raw) is None:  # even with what strings hold: a fifth of the time
        return
    if b"\\" in raw:  # without escaped quotes, every quote begins or ends a string
        raw = raw.replace(b"\\\\", b"..").replace(b'\\"', b"..")
    if raw.count(b'"') > 2 * MAX_STRINGS:
        raise _too_many("strings", MAX_STRINGS)
    if excess := _excess(b"".join(raw.split(b'"')[::2])):
        raise excess


def _excess(outside: bytes) -> RequestRefused | None:
    """Returns the refusal of what JSON has too many of outside of its strings, if anything."""
    containers = outside.count(b"[") + outside.count(b"{")
    if containers > MAX_CONTAINERS:
        return _too_many("lists and objects", MAX_CONTAINERS)
    if outside.count(b",") + containers > MAX_VALUES:
        return _too_many("values", MAX_VALUES)
    if len(outside) > MAX_DIGITS and len(outside) - len(outside.translate(None, b"0123456789")) > MAX_DIGITS:
        return _too_many("digits of numbers", MAX_DIGITS)
    return None


def _too_many(what: str, most: int) -> RequestRefused:
    return invalid("body", f"has more than {most} {what}")


def _parsed(raw: bytes) -> Any:
    """The value. A number that is too large for a float is infinite: a field that takes floats refuses it."""
    try:
        return jiter.from_json(raw, allow_inf_nan=False, cache_mode="keys", catch_duplicate_keys=True)
    except ValueError as error:
        problem = str(error)
        if problem.startswith("Detected duplicate key"):  # two components could each use a different value
            problem = "an object has a name twice"  # without the name, which is the client's text
        raise invalid("body", f"is not valid JSON: {problem}") from None


async def give_way(num_bytes: int) -> None:
    """Lets other tasks run, if the step before or after is on more than STEP_BYTES."""
    if num_bytes > STEP_BYTES:
        await asyncio.sleep(0)


def packed(ids: list[Any], field: str) -> "array[int]":
    """Returns the token ids of a list. Raises RequestRefused (INVALID_REQUEST) if an element is not an int32."""
    if set(map(type, ids)) - {int}:  # true is an int, too
        wrong = next(index for index, item in enumerate(ids) if type(item) is not int)
        raise invalid(field, f"the element at index {wrong} is not a token id")
    try:
        return array("i", ids)
    except OverflowError:
        wrong = next(item for item in ids if not -(1 << 31) <= item < 1 << 31)
        raise invalid(field, f"token id {wrong} is out of range") from None


async def json_list(numbers: Sequence[int], of: Callable[[int], str] | None = None) -> orjson.Fragment:
    """Returns numbers as JSON; `of`: texts that take their places. There may be millions: a text of 4 MiB can have as
    many tokens. Other tasks run in between."""
    parts = []
    for start in range(0, len(numbers), PIECE):
        piece = numbers[start : start + PIECE]
        parts.append(orjson.dumps(list(piece) if of is None else list(map(of, piece)))[1:-1])
        if start:
            await asyncio.sleep(0)
    return orjson.Fragment(b"[%b]" % b",".join(parts))
