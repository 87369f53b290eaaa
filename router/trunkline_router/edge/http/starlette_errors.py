"""Errors that Starlette's routing finds, in the shape of the path's API: unknown paths and wrong methods."""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from trunkline_router.edge.http.headers import request_id_of, response_headers
from trunkline_router.edge.http.refusal import http_refusal
from trunkline_router.record.error_statuses import PROTOCOL, protocol_body
from trunkline_router.record.refused_calls import RefusedCalls

Handler = Callable[[Request, Exception], Awaitable[Response]]


def error_handlers(refused: RefusedCalls) -> Mapping[int | type[Exception], Handler]:
    """What Starlette(exception_handlers=…) takes."""
    return {HTTPException: partial(_answer, refused)}


async def _answer(refused: RefusedCalls, request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = error.status_code if error.status_code in PROTOCOL else 400
    message = {404: f"there is no {request.url.path}", 405: f"{request.url.path} does not take {request.method}"}
    request_id = request_id_of(request.scope["headers"])
    refused.note(http_refusal(request.scope, PROTOCOL[status].code, status, request_id))
    body = protocol_body(status, message.get(status, error.detail), request.url.path, request_id)
    named = {name.decode(): value.decode() for name, value in response_headers(request_id)}
    return Response(body, status, headers={**(error.headers or {}), **named}, media_type="application/json")
