"""Errors that Starlette's routing finds, in the shape of the path's API: unknown paths and wrong methods."""

from collections.abc import Awaitable, Callable, Mapping

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from trunkline_router.http.errors import PROTOCOL, protocol_body
from trunkline_router.http.headers import request_id_of, response_headers

Handler = Callable[[Request, Exception], Awaitable[Response]]


async def _answer(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = error.status_code if error.status_code in PROTOCOL else 400
    message = {404: f"there is no {request.url.path}", 405: f"{request.url.path} does not take {request.method}"}
    request_id = request_id_of(request.scope["headers"])
    body = protocol_body(status, message.get(status, error.detail), request.url.path, request_id)
    named = {name.decode(): value.decode() for name, value in response_headers(request_id)}
    return Response(body, status, headers={**(error.headers or {}), **named}, media_type="application/json")


HANDLERS: Mapping[int | type[Exception], Handler] = {HTTPException: _answer}  # Starlette(exception_handlers=HANDLERS)
