"""Request headers that the router uses, and its response headers. Credentials are returned and never logged."""

import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field

from trunkline.status import CODE_UNAUTHENTICATED, UNAUTHENTICATED, RequestRefused, invalid
from trunkline_router.record.error_statuses import Header

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


@dataclass(frozen=True, slots=True)
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


def response_headers(
    request_id: str,
    *,
    worker: str = "",
    cached_tokens: int | None = None,
    rate_limits: Iterable[tuple[str, str]] = (),
) -> list[Header]:
    """Headers of a response.

    worker: the worker that answers; "": not told
    cached_tokens: tokens of the prompt that came from the cache; None: the tenant may not see them, or not known
    rate_limits: names behind "x-ratelimit-", such as "remaining-requests", with their values
    """
    named = request_id.encode("latin-1")
    made = [(REQUEST_ID, named), (b"request-id", named)]  # Anthropic's clients read the second one
    if worker:
        made.append((b"x-trunkline-worker", worker.encode("latin-1", "replace")))
    if cached_tokens is not None:
        made.append((b"x-trunkline-cached-tokens", b"%d" % cached_tokens))
    made += [(f"x-ratelimit-{name}".encode(), value.encode()) for name, value in rate_limits]
    return made


def _request_id(given: bytes | None) -> str:
    if given is None:
        return uuid.uuid4().hex
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
            raise _unauthenticated("Authorization must be Bearer with an API key or a token")
        given.add(token.strip())
    if api_key is not None:
        given.add(api_key)
    given.discard(b"")  # some clients send an empty key if they have none
    if len(given) > 1:
        raise _unauthenticated("Authorization and x-api-key name two different credentials")
    for credential in given:
        if len(credential) > MAX_CREDENTIAL_CHARACTERS or not credential.isascii():
            raise _unauthenticated("the credential is too long or is not ASCII")
        return credential.decode()
    return ""


def _text(name: bytes, found: dict[bytes, bytes]) -> str:
    try:
        return found.get(name, b"").decode()
    except UnicodeDecodeError:
        raise invalid(name.decode(), "is not UTF-8") from None


def _unauthenticated(message: str) -> RequestRefused:
    return RequestRefused(CODE_UNAUTHENTICATED, UNAUTHENTICATED, message)
