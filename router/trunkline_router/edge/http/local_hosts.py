"""Protects a server that asks for no credentials from web pages of other origins.

A page can have its own name resolved to this machine (DNS rebinding). To the browser, requests of that page then go to
the page's own origin. They still carry the page's name in Host.
"""

from ipaddress import ip_address

from starlette.types import ASGIApp, Receive, Scope, Send

from trunkline.status import CODE_PERMISSION_DENIED, FORBIDDEN, RequestRefused
from trunkline_router.edge.http.headers import request_id_of, response_headers
from trunkline_router.edge.http.refusal import http_refusal
from trunkline_router.record.error_statuses import JSON_TYPE, body_for, status_of
from trunkline_router.record.refused_calls import RefusedCalls


class LocalHosts:
    """Answers requests whose Host is an IP address or localhost, and refuses the others with FORBIDDEN."""

    def __init__(self, app: ASGIApp, refused: RefusedCalls) -> None:
        self._app = app
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if is_local(next((value for name, value in scope["headers"] if name == b"host"), b"")):
            await self._app(scope, receive, send)
            return
        refused = RequestRefused(
            CODE_PERMISSION_DENIED, FORBIDDEN, "without credentials, Host must be an IP address or localhost"
        )
        request_id = request_id_of(scope["headers"])
        self._refused.note(http_refusal(scope, refused.reason, status_of(refused), request_id))
        body = body_for(scope["path"], refused, request_id)
        headers = [JSON_TYPE, (b"content-length", b"%d" % len(body)), *response_headers(request_id)]
        await send({"type": "http.response.start", "status": status_of(refused), "headers": headers})
        await send({"type": "http.response.body", "body": body})


def is_local(host: bytes) -> bool:
    """Whether a Host header cannot be the name of a web page: an IP address, localhost, or absent (HTTP/1.0)."""
    name = host.decode("latin-1").lower()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.rpartition(":")[0] or name
    if name in ("", "localhost") or name.endswith(".localhost"):
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
