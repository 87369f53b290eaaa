"""Reads the JSON body of a request."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from trunkline.status import invalid
from trunkline_router.http.disconnect import ClientGone
from trunkline_router.http.json_parser import parse_json
from trunkline_router.http.json_shape import check_shape
from trunkline_router.request.steps import give_way

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

JSON_CONTENT_TYPE = "application/json"
# In an ASGI scope's `extensions`: a function that returns whether the whole body has arrived. Most come with the head.
HAS_BODY = "trunkline.has_body"


def has_body(scope: MutableMapping[str, Any]) -> bool:
    """Whether read_body() will return without waiting for the client."""
    arrived: Callable[[], bool] = scope["extensions"][HAS_BODY]
    return arrived()


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


async def parse_object(raw: bytes) -> dict[str, Any]:
    """The JSON object that a body is. Lets other tasks run if it is long. Raises RequestRefused (INVALID_REQUEST)."""
    if not raw:
        raise invalid("body", "is empty")
    await check_shape(raw)
    value = await parse_json(raw)
    if not isinstance(value, dict):
        raise invalid("body", "is not a JSON object")
    return value


async def read_object(receive: Receive) -> dict[str, Any]:
    """Reads and parses the body. Raises RequestRefused (INVALID_REQUEST) and ClientGone."""
    return await parse_object(await read_body(receive))
