"""Request headers that the router uses, and its response headers. Credentials are returned and never logged."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from ipaddress import ip_address
from typing import Any

from trunkline.names import AUTHORIZATION_KEY, SESSION_KEY, TENANT_KEY
from trunkline.status import RequestRefused, forbidden, invalid, unauthenticated
from trunkline.validation import session_problem
from trunkline_router.access.access import Metadata
from trunkline_router.access.identity.needed_roles import PATHS
from trunkline_router.quotas.quota import RateLimit
from trunkline_router.record.error_statuses import Header, is_anthropic
from trunkline_router.record.refused_calls import RefusedCall
from trunkline_router.record.request_record import HTTP
from trunkline_runtime.telemetry.trace_context import new_request_id

ROUTES = frozenset(name.partition(" ")[2] for name in PATHS)

MAX_REQUEST_ID_CHARACTERS = 128
REQUEST_ID = b"x-request-id"
_REQUEST_ID = re.compile(rb"[!-~]{1,%d}" % MAX_REQUEST_ID_CHARACTERS)  # visible ASCII
# Two values of such a header could be used by different components.
_ONCE = {
    *(REQUEST_ID, b"traceparent", b"authorization", b"x-api-key", b"content-type"),
    *(b"x-trunkline-tenant", b"x-trunkline-session"),
}
# In which opencode, Claude Code and Codex name a session.
_SESSIONS = (b"x-session-affinity", b"x-claude-code-session-id", b"session-id")


@dataclass(slots=True)
class RequestHeaders:
    """What a request's headers say.

    request_id: from X-Request-Id, else a new one
    content_type: without parameters, in lower case
    metadata: what a gRPC call would have: the credential, the tenant and session that the client names, and its trace
    """

    request_id: str
    content_type: str = ""
    metadata: Metadata = field(default=(), repr=False)


def parse_headers(headers: Iterable[Header]) -> RequestHeaders:
    """Parses the headers of an ASGI scope, whose names are in lower case.

    Raises RequestRefused: INVALID_REQUEST for a repeated header or an unusable X-Request-Id, UNAUTHENTICATED for an
    Authorization of another scheme than Bearer, or two different credentials.
    """
    found: dict[bytes, bytes] = {}
    states: list[bytes] = []
    for name, value in headers:
        if name in _ONCE:
            if name in found:
                raise invalid(name.decode(), "is given more than once")
            found[name] = value
        elif name in _SESSIONS:
            found.setdefault(name, value)
        elif name == b"tracestate":
            states.append(value)
    metadata = (
        (AUTHORIZATION_KEY, _authorization(found.get(b"authorization", b""), found.get(b"x-api-key", b""))),
        (TENANT_KEY, _text(TENANT_KEY, found)),
        (SESSION_KEY, _text(SESSION_KEY, found) or _assistants_session(found)),
        ("traceparent", found.get(b"traceparent", b"").decode("latin-1")),
        ("tracestate", b",".join(states).decode("latin-1")),
    )
    return RequestHeaders(
        request_id=_request_id(found.get(REQUEST_ID)),
        content_type=found.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1"),
        metadata=tuple(each for each in metadata if each[1]),
    )


def _assistants_session(found: Mapping[bytes, bytes]) -> str:
    """The session that a coding assistant names. One that cannot be a session's name is left out."""
    named = (found.get(name, b"").decode("latin-1") for name in _SESSIONS)
    return next((session for session in named if session and session_problem(session) is None), "")


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
    return parents[0].decode("latin-1") if len(parents) == 1 else "", b",".join(states).decode("latin-1")


def check_host(headers: Iterable[Header]) -> None:
    """Raises RequestRefused (FORBIDDEN) if Host is neither an IP address nor localhost. It protects a server that asks
    for no credentials from web pages of other origins: a page can have its own name resolved to this machine (DNS
    rebinding). To the browser, that page's requests then go to the page's own origin. They still carry the page's name.
    """
    if not all(is_local(value) for name, value in headers if name == b"host"):
        raise forbidden("without credentials, Host must be an IP address or localhost")


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
    headers_of = _anthropic_limit if is_anthropic(path) else _openai_limit
    return [(name.encode(), value.encode()) for limit in limits for name, value in headers_of(limit, now_unix_s)]


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


def _authorization(authorization: bytes, api_key: bytes) -> str:
    """The one credential in the form of Authorization; "" if there is none. Some clients send an empty one then."""
    scheme, _, token = authorization.partition(b" ")
    if scheme.lower() not in (b"", b"bearer"):
        raise unauthenticated("Authorization must be Bearer with an API key or a token")
    given = {token.strip(), api_key} - {b""}
    if len(given) > 1:
        raise unauthenticated("Authorization and x-api-key name two different credentials")
    credential = b"".join(given)
    if not credential.isascii():
        raise unauthenticated("the credential is not ASCII")
    return f"Bearer {credential.decode()}" if credential else ""


def _text(name: str, found: dict[bytes, bytes]) -> str:
    try:
        return found.get(name.encode(), b"").decode()
    except UnicodeDecodeError:
        raise invalid(name, "is not UTF-8") from None
