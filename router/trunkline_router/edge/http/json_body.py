"""Reads the JSON body of a request.

The parser is jiter, pydantic's own: unlike orjson it finds names that an object has twice and keeps integers of more
than 64 bits, and it takes a fraction of the standard library's time.
"""

import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import jiter

from trunkline.status import invalid
from trunkline_router.edge.http.exchange import ClientGone
from trunkline_router.edge.http.json_limits import check_limits
from trunkline_router.record.long_work import give_way

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

JSON_CONTENT_TYPE = "application/json"
MAX_DEPTH = 200  # jiter's limit, which cannot be set


async def read_body(receive: Receive) -> bytes:
    """The whole body. Raises ClientGone if the client goes before. The server bounds size and time."""
    message = await receive()
    if message["type"] == "http.request" and not message.get("more_body", False):
        return bytes(message.get("body", b""))
    body = bytearray()
    while message["type"] == "http.request":
        body += message.get("body", b"")
        if not message.get("more_body", False):
            await give_way(len(body))
            return bytes(body)
        message = await receive()
    raise ClientGone


def check_content_type(content_type: str) -> None:
    """Raises RequestRefused unless the body is said to be JSON. Pages of other origins may send other types to a server
    on the user's machine without asking it first.  content_type: without parameters, in lower case"""
    if content_type != JSON_CONTENT_TYPE:
        given = f"not {content_type!r}" if content_type else "which is missing"
        raise invalid("content-type", f"must be {JSON_CONTENT_TYPE}, {given}")


async def parse_object(raw: bytes, took_cpu_s: Callable[[float], object] = lambda _: None) -> dict[str, Any]:
    """The JSON object that a body is. Lets other tasks run before, between and after the two steps that a long body
    takes. Raises RequestRefused (INVALID_REQUEST).  took_cpu_s: is told for how long each step held the event loop,
    also if the body is refused"""
    if not raw:
        raise invalid("body", "is empty")
    await give_way(len(raw))
    with _timed(took_cpu_s):
        check_limits(raw)
    await give_way(len(raw))
    with _timed(took_cpu_s):
        value = _parsed(raw)
    await give_way(len(raw))
    if not isinstance(value, dict):
        raise invalid("body", "is not a JSON object")
    return value


@contextmanager
def _timed(took_cpu_s: Callable[[float], object]) -> Iterator[None]:
    begun_s = time.thread_time()
    try:
        yield
    finally:
        took_cpu_s(time.thread_time() - begun_s)


def _parsed(raw: bytes) -> Any:
    """The value. A number that is too large for a float is infinite: a field that takes floats refuses it."""
    try:
        return jiter.from_json(raw, allow_inf_nan=False, cache_mode="keys", catch_duplicate_keys=True)
    except ValueError as error:
        problem = str(error)
        if problem.startswith("Detected duplicate key"):  # two components could each use a different value
            problem = "an object has a name twice"  # without the name, which is the client's text
        raise invalid("body", f"is not valid JSON: {problem}") from None


async def read_object(receive: Receive) -> dict[str, Any]:
    """Reads and parses the body. Raises RequestRefused (INVALID_REQUEST) and ClientGone."""
    return await parse_object(await read_body(receive))
