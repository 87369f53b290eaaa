"""An endpoint of the HTTP API as an ASGI application: checks the caller, passes the gate, answers errors."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from starlette.types import Receive, Scope, Send

from trunkline.status import RequestRefused, internal
from trunkline_router.access.access import VISITOR, Metadata, NoCredentials, refused_tenant
from trunkline_router.access.gate.http_passage import HttpPassage, StatusPassage
from trunkline_router.access.identity.needed_roles import Needed
from trunkline_router.edge.http.exchange import ClientGone, respond
from trunkline_router.edge.http.headers import (
    RequestHeaders,
    http_refusal,
    parse_headers,
    request_id_of,
    response_headers,
)
from trunkline_router.edge.http_call import Edge, HttpCall, given_up, metadata_of
from trunkline_router.edge.request_fields import known_part
from trunkline_router.record.error_statuses import body_for, refusal_headers, status_of
from trunkline_runtime.log import get_logger

Handler = Callable[[HttpCall], Awaitable[None]]
WHERE_CREDENTIALS = "the header 'Authorization: Bearer KEY' or 'x-api-key: KEY'"


class Endpoint:
    """Serves one path. A handler that raises RequestRefused before its response has begun is answered with the error's
    status.

    route: the template of its path
    needed: what the caller needs
    """

    def __init__(self, edge: Edge, route: str, needed: Needed, handle: Handler) -> None:
        self._edge = edge
        self._route = route
        self._is_open = edge.access.is_open(needed)
        self._roles = needed.roles
        self._passage = StatusPassage if needed.is_of_router else HttpPassage
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, call, caller, started_s = RequestHeaders(request_id=""), None, VISITOR, time.monotonic()
        metadata: Metadata = ()
        failure: RequestRefused
        task = asyncio.current_task()
        assert task is not None
        try:
            peer = peer_of(scope)
            if self._is_open:  # whatever else the headers say: probes must be answered
                headers = RequestHeaders(request_id_of(scope["headers"]))
            else:
                headers = parse_headers(scope["headers"])
                metadata = metadata_of(headers)
                caller = self._edge.access.caller(metadata, self._roles, peer)
            with self._passage(self._edge.gate, peer, caller.tenant, task.cancel) as passage:
                call = HttpCall(self._edge, scope, receive, send, headers, metadata, caller, passage)
                await self._handle(call)
            return
        except ClientGone:
            return
        except NoCredentials:
            failure = NoCredentials(WHERE_CREDENTIALS)
        except RequestRefused as refused:
            # The frames of its traceback refer to it and to the body: a cycle, which would stay in memory until the
            # garbage collector runs.
            refused.__context__ = None
            failure = refused.with_traceback(None)
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
        request_id = headers.request_id or request_id_of(scope["headers"])
        if call is None or not call.is_request:
            self._note(failure, scope, request_id, caller.tenant or refused_tenant(failure), started_s)
        told = response_headers(request_id) if call is None else call.response_headers()
        body = body_for(self._route, failure, request_id)
        await respond(send, status_of(failure), body, [*told, *refusal_headers(failure)])

    def _note(self, refused: RequestRefused, scope: Scope, request_id: str, tenant: str, started_s: float) -> None:
        self._edge.gate.refused.note(
            http_refusal(
                scope,
                refused.reason,
                status_of(refused),
                request_id,
                route=self._route,
                tenant=tenant,
                field=known_part(refused.field),
                started_s=started_s,
            )
        )


def peer_of(scope: Scope) -> str:
    """Returns the client's address as gRPC writes it: "ipv4:10.0.0.1:50312"."""
    host, port = scope.get("client") or ("", 0)
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
