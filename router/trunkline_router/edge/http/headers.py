"""Request headers that the router uses, and its response headers. Credentials are returned and never logged."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from ipaddress import ip_address
from typing import Any

from trunkline.status import RequestRefused, invalid, unauthenticated
from trunkline_router.access.identity.needed_roles import PATHS
from trunkline_router.quotas.quota import RateLimit
from trunkline_router.record.error_statuses import Header, is_anthropic
from trunkline_router.record.refused_calls import RefusedCall
from trunkline_router.record.request_record import HTTP
from trunkline_runtime.telemetry.trace_context import new_request_id

ROUTES = frozenset(name.partition(" ")[2] for name in PATHS)

MAX_REQUEST_ID_CHARACTERS = 128
MAX_CREDENTIAL_CHARACTERS = 8192  # a JWT with many claims
REQUEST_ID = b"x-request-id"
_REQUEST_ID = re.compile(rb"[!-~]{1,%d}" % MAX_REQUEST_ID_CHARACTERS)  # visible ASCII
# https://www.w3.org/TR/trace-context/#traceparent-header; higher versions may add fields
_TRACEPARENT = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
MAX_TRACESTATE_BYTES = 512  # what the specification asks servers to pass on

# Two values of such a header could be used by different components.
_ONCE = {
    *(REQUEST_ID, b"traceparent", b"authorization", b"x-api-key", b"content-type"),
    *(b"x-trunkline-tenant", b"x-trunkline-session"),
}


@dataclass(slots=True)
class RequestHeaders:
    """What a request's headers say.

    request_id: from X-Request-Id, else a new one
    credential: the API key or token of Authorization: Bearer or of x-api-key; "" if there is none. Not in repr()
    tenant: from x-trunkline-tenant: the tenant that the client names; "" if it names none
    """

    request_id: str
    traceparent: str = ""
    tracestate: str = ""
    credential: str = field(default="", repr=False)
    tenant: str = ""
    session: str = ""  # groups requests, for example by conversation
    content_type: str = ""  # without parameters, in lower case


def parse_headers(headers: Iterable[Header]) -> RequestHeaders:
    """Parses the headers of an ASGI scope, whose names are in lower case.

    Raises RequestRefused: INVALID_REQUEST for a repeated header or an unusable X-Request-Id, UNAUTHENTICATED for an
    Authorization of another scheme than Bearer, or two different credentials. A malformed traceparent is ignored, as
    its specification asks.
    """
    found: dict[bytes, bytes] = {}
    states: list[bytes] = []
    for name, value in headers:
        if name in _ONCE:
            if name in found:
                raise invalid(name.decode(), "is given more than once")
            found[name] = value
        elif name == b"tracestate":
            states.append(value)
    traceparent, tracestate = _trace(found.get(b"traceparent", b""), states)
    return RequestHeaders(
        request_id=_request_id(found.get(REQUEST_ID)),
        traceparent=traceparent,
        tracestate=tracestate,
        credential=_credential(found.get(b"authorization"), found.get(b"x-api-key")),
        tenant=_text(b"x-trunkline-tenant", found),
        session=_text(b"x-trunkline-session", found),
        content_type=found.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1"),
    )


def request_id_of(headers: Iterable[Header]) -> str:
    """The id of any request: from X-Request-Id, else, or if that is unusable, a new one."""
    given = [value for name, value in headers if name == REQUEST_ID]
    try:
        return _request_id(given[0] if len(given) == 1 else None)
    except RequestRefused:
        return _request_id(None)


def trace_of(headers: Iterable[Header]) -> tuple[str, str]:
    """(traceparent, tracestate) of any request; empty strings if there is none, or more than one."""
    parents = [value for name, value in headers if name == b"traceparent"]
    states = [value for name, value in headers if name == b"tracestate"]
    return _trace(parents[0] if len(parents) == 1 else b"", states)


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


def response_headers(request_id: str, *, worker: str = "", cached_tokens: int | None = None) -> list[Header]:
    """Headers of a response.

    worker: the worker that answers; "": not told
    cached_tokens: tokens of the prompt that came from the cache; None: the tenant may not see them, or not known
    """
    named = request_id.encode("latin-1")
    made = [(REQUEST_ID, named), (b"request-id", named)]  # Anthropic's clients read the second one
    if worker:
        made.append((b"x-trunkline-worker", worker.encode("latin-1", "replace")))
    if cached_tokens is not None:
        made.append((b"x-trunkline-cached-tokens", b"%d" % cached_tokens))
    return made


def rate_limit_headers(limits: Iterable[RateLimit], path: str, now_unix_s: float) -> list[Header]:
    """What is left of a tenant's quotas, in the headers of the API that the path belongs to."""
    told = _anthropic_limit if is_anthropic(path) else _openai_limit
    return [(name.encode(), value.encode()) for limit in limits for name, value in told(limit, now_unix_s)]


def _openai_limit(limit: RateLimit, now_unix_s: float) -> list[tuple[str, str]]:
    return [
        (f"x-ratelimit-limit-{limit.of}", str(limit.limit)),
        (f"x-ratelimit-remaining-{limit.of}", str(limit.remaining)),
        (f"x-ratelimit-reset-{limit.of}", f"{limit.reset_ms / 1e3:g}s"),
    ]


def _anthropic_limit(limit: RateLimit, now_unix_s: float) -> list[tuple[str, str]]:
    """The reset is a time of RFC 3339 in whole seconds, rounded up."""
    reset = datetime.fromtimestamp(math.ceil(now_unix_s + limit.reset_ms / 1e3), UTC)
    return [
        (f"anthropic-ratelimit-{limit.of}-limit", str(limit.limit)),
        (f"anthropic-ratelimit-{limit.of}-remaining", str(limit.remaining)),
        (f"anthropic-ratelimit-{limit.of}-reset", reset.strftime("%Y-%m-%dT%H:%M:%SZ")),
    ]


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
    """Describes a request that is refused before it reaches the path that all protocols share.

    scope: of ASGI.  route: "" for one that is found by the path alone
    """
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


def _request_id(given: bytes | None) -> str:
    if given is None:
        return new_request_id()
    if _REQUEST_ID.fullmatch(given) is None:
        raise invalid("x-request-id", f"must have 1 to {MAX_REQUEST_ID_CHARACTERS} visible ASCII characters")
    return given.decode()


def _trace(parent: bytes, states: list[bytes]) -> tuple[str, str]:
    found = _TRACEPARENT.fullmatch(parent)
    if found is None or (parent[:2] == b"00" and found[1] is not None):
        return "", ""
    state = b",".join(states)
    if len(state) > MAX_TRACESTATE_BYTES or not state.isascii():
        state = b""
    # `ignore`: a higher version's fields may have any bytes
    return parent.decode("ascii", "ignore"), state.decode()


def _credential(authorization: bytes | None, api_key: bytes | None) -> str:
    given: set[bytes] = set()
    if authorization is not None:
        scheme, _, token = authorization.partition(b" ")
        if scheme.lower() != b"bearer":
            raise unauthenticated("Authorization must be Bearer with an API key or a token")
        given.add(token.strip())
    if api_key is not None:
        given.add(api_key)
    given.discard(b"")  # some clients send an empty key if they have none
    if len(given) > 1:
        raise unauthenticated("Authorization and x-api-key name two different credentials")
    for credential in given:
        if len(credential) > MAX_CREDENTIAL_CHARACTERS or not credential.isascii():
            raise unauthenticated("the credential is too long or is not ASCII")
        return credential.decode()
    return ""


def _text(name: bytes, found: dict[bytes, bytes]) -> str:
    try:
        return found.get(name, b"").decode()
    except UnicodeDecodeError:
        raise invalid(name.decode(), "is not UTF-8") from None
