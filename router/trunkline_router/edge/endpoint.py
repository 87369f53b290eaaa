"""An endpoint of the HTTP API as an ASGI application: checks the caller, passes the gate, answers errors."""

import asyncio
from collections.abc import Awaitable, Callable

from starlette.types import Receive, Scope, Send

from trunkline.status import RequestRefused, internal
from trunkline_router.edge.http_call import Edge, HttpCall, given_up, metadata_of
from trunkline_router.gate.http_passage import HttpPassage
from trunkline_router.http.disconnect import ClientGone
from trunkline_router.http.errors import (
    JSON_TYPE,
    Header,
    anthropic_body,
    openai_body,
    refusal_headers,
    status_of,
)
from trunkline_router.http.headers import RequestHeaders, parse_headers, response_headers
from trunkline_router.identity.identity import Role
from trunkline_runtime.log import get_logger

Handler = Callable[[HttpCall], Awaitable[None]]
ErrorBody = Callable[[RequestRefused, str], bytes]  # from a refusal and the request's id


def openai_error(refused: RequestRefused, request_id: str) -> bytes:
    """OpenAI's error object."""
    return openai_body(refused)


def anthropic_error(refused: RequestRefused, request_id: str) -> bytes:
    """Anthropic's error object."""
    return anthropic_body(refused, request_id)


class Endpoint:
    """Serves one path. A handler that raises RequestRefused before its response has begun is answered with the error's
    status.

    role: what the caller needs
    error_body: the shape of errors
    """

    def __init__(self, edge: Edge, role: Role, handle: Handler, error_body: ErrorBody = openai_error) -> None:
        self._edge = edge
        self._role = role
        self._handle = handle
        self._error_body = error_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, call = RequestHeaders(request_id=""), None
        task = asyncio.current_task()
        assert task is not None
        try:
            headers = parse_headers(scope["headers"])
            caller = self._edge.access.caller(metadata_of(headers), self._role, peer := peer_of(scope))
            with HttpPassage(self._edge.gate, peer, caller.tenant, task.cancel) as passage:
                call = HttpCall(self._edge, scope, receive, send, headers, caller, passage)
                await self._handle(call)
            return
        except ClientGone:
            return
        except RequestRefused as refused:
            failure = refused
        except asyncio.CancelledError as cancelled:
            given = given_up(cancelled)
            if given is None:
                raise
            failure = given
        except Exception as error:
            failure = internal(headers.request_id)
            get_logger().error("unexpected error", request_id=headers.request_id, exc_info=error)
            if call is not None and call.has_begun:
                raise
        told = response_headers(headers.request_id) if call is None else call.response_headers()
        await self._refuse(send, failure, headers.request_id, told)

    async def _refuse(self, send: Send, refused: RequestRefused, request_id: str, told: list[Header]) -> None:
        body = self._error_body(refused, request_id)
        headers = [JSON_TYPE, (b"content-length", b"%d" % len(body)), *told, *refusal_headers(refused)]
        await send({"type": "http.response.start", "status": status_of(refused), "headers": headers})
        await send({"type": "http.response.body", "body": body})


def peer_of(scope: Scope) -> str:
    """Returns the client's address as gRPC writes it: "ipv4:10.0.0.1:50312"."""
    host, port = scope.get("client") or ("", 0)
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
