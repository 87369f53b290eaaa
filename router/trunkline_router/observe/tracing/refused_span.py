"""The span of a call that was refused before it became a request."""

from collections.abc import Sequence

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, Status, StatusCode

from trunkline_router.observe.tracing.request_attributes import (
    ERROR_TYPE,
    HTTP_METHOD,
    HTTP_ROUTE,
    HTTP_SERVER_ERROR,
    HTTP_STATUS,
    RPC_METHOD,
    RPC_STATUS,
    RPC_SYSTEM,
    SERVER_ERRORS,
    STATUS_NAMES,
    URL_PATH,
    URL_SCHEME,
)
from trunkline_router.observe.tracing.trace_builder import UNSET, Attributes, TraceBuilder
from trunkline_router.record.refused_calls import KNOWN_METHODS, RefusedCall
from trunkline_router.record.request_record import GRPC, RequestRecord

# Of RFC 9110, and PATCH: the methods that the conventions know. Any other one is _OTHER, and HTTP in names of spans.
OTHER_METHOD, UNNAMED_METHOD = "_OTHER", "HTTP"


def refused_span(
    call: RefusedCall, record: RequestRecord, ended_s: float, kept: str, resource: Resource
) -> Sequence[ReadableSpan]:
    """One span.  record: says its place in its trace, and when it began"""
    trace = TraceBuilder(record, resource)
    attributes: Attributes = {"trunkline.outcome": call.reason, "trunkline.kept": [kept]}
    for name, value in (("request_id", call.request_id), ("tenant", call.tenant)):
        if value:
            attributes["trunkline." + name] = value
    trace.add(
        _name(call),
        record.parent_span_id,
        record.started_s,
        ended_s,
        attributes | _protocol(call),
        kind=SpanKind.SERVER,
        status=Status(StatusCode.ERROR) if is_servers_fault(call) else UNSET,
        is_parent_remote=True,
    )
    return trace.spans


def is_servers_fault(call: RefusedCall) -> bool:
    """Whether the call failed through no fault of its client."""
    return call.status in SERVER_ERRORS if call.protocol == GRPC else call.status >= HTTP_SERVER_ERROR


def _name(call: RefusedCall) -> str:
    if call.protocol == GRPC:
        return call.route
    method = call.method if call.method in KNOWN_METHODS else UNNAMED_METHOD
    return f"{method} {call.route}" if call.route else method


def _protocol(call: RefusedCall) -> Attributes:
    if call.protocol == GRPC:
        code = STATUS_NAMES.get(call.status, call.reason)
        return {RPC_SYSTEM: "grpc", RPC_METHOD: call.route, RPC_STATUS: code, ERROR_TYPE: code}
    attributes: Attributes = {
        HTTP_METHOD: call.method if call.method in KNOWN_METHODS else OTHER_METHOD,
        HTTP_STATUS: call.status,
        URL_SCHEME: call.url_scheme,
        ERROR_TYPE: call.reason,
    }
    # Without a route the path is anything that a client has written, so it is not told.
    return attributes | {HTTP_ROUTE: call.route, URL_PATH: call.route} if call.route else attributes
