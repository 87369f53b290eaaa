"""Describes an HTTP request that was refused before it reached the shared path."""

from collections.abc import Iterable, Mapping
from typing import Any

from trunkline_router.access.identity.needed_roles import PATHS
from trunkline_router.edge.http.headers import trace_of
from trunkline_router.record.error_statuses import Header
from trunkline_router.record.refused_calls import RefusedCall
from trunkline_router.record.request_record import HTTP

ROUTES = frozenset(name.partition(" ")[2] for name in PATHS)


def http_refusal(
    scope: Mapping[str, Any],
    reason: str,
    status: int,
    request_id: str,
    *,
    route: str = "",
    tenant: str = "",
    field: str = "",
    started_s: float | None = None,
) -> RefusedCall:
    """scope: of ASGI.  route: "" for one that is found by the path alone"""
    headers: Iterable[Header] = scope["headers"]
    traceparent, tracestate = trace_of(headers)
    path, client = scope["path"], scope.get("client")
    return RefusedCall(
        HTTP,
        reason,
        status,
        request_id=request_id,
        method=scope["method"],
        route=route or (path if path in ROUTES else ""),
        url_scheme=scope["scheme"],
        host=client[0] if client else "",
        tenant=tenant,
        field=field,
        traceparent=traceparent,
        tracestate=tracestate,
        started_s=started_s,
    )
