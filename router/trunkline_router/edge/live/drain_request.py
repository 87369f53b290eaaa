"""What a drain, and its end, can be asked for."""

from typing import TypeVar

from trunkline_router.edge.http.json_body import check_content_type, parse_object, read_body
from trunkline_router.edge.http_call import HttpCall
from trunkline_router.edge.request_fields import Fields, validated


class DrainBody(Fields):
    """The body of POST /fleet/workers/{worker}/drain.

    timeout_s: time for running requests to finish; null: the worker's own setting
    """

    timeout_s: float | None = None


class UndrainBody(Fields):
    """The body of POST /fleet/workers/{worker}/undrain, which has no fields."""


Body = TypeVar("Body", DrainBody, UndrainBody)


async def body_of(call: HttpCall, kind: type[Body]) -> Body:
    """Returns the body of a call, which may be empty. Raises RequestRefused (INVALID_REQUEST)."""
    raw = await call.passage.read(lambda: read_body(call.receive))
    if not raw:
        return kind()
    check_content_type(call.headers.content_type)
    body: Body = validated(kind, await parse_object(raw))
    call.check_unknown(body.unknown())
    return body
