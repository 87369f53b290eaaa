"""The error table over HTTP: the status of each reason, and the error bodies of OpenAI's and of Anthropic's API."""

import json
import math
from dataclasses import dataclass

from trunkline.status import (
    CONTEXT_LENGTH_EXCEEDED,
    DEADLINE_EXCEEDED,
    FORBIDDEN,
    INTERNAL,
    INVALID_REQUEST,
    MODEL_NOT_FOUND,
    NO_WORKER,
    OVERLOADED,
    QUARANTINED,
    QUOTA_EXCEEDED,
    REQUEST_NOT_FOUND,
    UNAUTHENTICATED,
    WORKER_NOT_FOUND,
    RequestRefused,
    code_of,
)

Header = tuple[bytes, bytes]

# Reasons that only HTTP has: gRPC stores no responses, and serves no page.
RESPONSE_NOT_FOUND, PREVIOUS_RESPONSE_NOT_FOUND = "RESPONSE_NOT_FOUND", "PREVIOUS_RESPONSE_NOT_FOUND"
PAGE_FILE_NOT_FOUND = "PAGE_FILE_NOT_FOUND"

ANTHROPIC_PATH = "/v1/messages"
THREAD = "thread"  # Anthropic's field for conversations that the server stores
# Anthropic's client, told so, sends the request again without the field.
_NO_THREADS = {"error_code": "thread_unsupported_request"}
# Reasons after which the same request would fail again, although clients retry the statuses of some of them.
FINAL = frozenset({QUARANTINED, INTERNAL})
# OpenAI's clients give up if they are told to wait for longer; Anthropic's wait for as long as they are told.
MAX_RETRY_DELAY_MS = 120_000

MAX_MESSAGE_CHARACTERS = 400  # a message may quote a client's input
JSON_TYPE: Header = (b"content-type", b"application/json")


@dataclass(frozen=True, slots=True)
class HttpError:
    """A row of the error table.

    code: the machine-readable code in OpenAI's body
    type: OpenAI's type of error
    anthropic_type: Anthropic's
    """

    status: int
    code: str
    type: str
    anthropic_type: str


_INVALID, _SERVER = "invalid_request_error", "server_error"

TABLE = {
    INVALID_REQUEST: HttpError(400, "invalid_request", _INVALID, _INVALID),
    CONTEXT_LENGTH_EXCEEDED: HttpError(400, "context_length_exceeded", _INVALID, _INVALID),
    MODEL_NOT_FOUND: HttpError(404, "model_not_found", _INVALID, "not_found_error"),
    REQUEST_NOT_FOUND: HttpError(404, "request_not_found", _INVALID, "not_found_error"),
    PAGE_FILE_NOT_FOUND: HttpError(404, "page_file_not_found", _INVALID, "not_found_error"),
    WORKER_NOT_FOUND: HttpError(404, "worker_not_found", _INVALID, "not_found_error"),
    # OpenAI's code, which clients test for
    RESPONSE_NOT_FOUND: HttpError(404, "response_not_found", _INVALID, "not_found_error"),
    PREVIOUS_RESPONSE_NOT_FOUND: HttpError(400, "previous_response_not_found", _INVALID, _INVALID),
    UNAUTHENTICATED: HttpError(401, "invalid_api_key", _INVALID, "authentication_error"),
    FORBIDDEN: HttpError(403, "forbidden", "permission_error", "permission_error"),
    OVERLOADED: HttpError(429, "overloaded", "rate_limit_error", "rate_limit_error"),
    QUOTA_EXCEEDED: HttpError(429, "quota_exceeded", "rate_limit_error", "rate_limit_error"),
    NO_WORKER: HttpError(503, "no_worker", _SERVER, "overloaded_error"),
    DEADLINE_EXCEEDED: HttpError(504, "deadline_exceeded", _SERVER, "timeout_error"),
    QUARANTINED: HttpError(422, "quarantined", _INVALID, _INVALID),
    INTERNAL: HttpError(500, "internal", _SERVER, "api_error"),
}
# For reasons of newer versions, by number of google.rpc.Code.
_BY_CODE = {
    code_of(reason): TABLE[reason]
    for reason in (
        *(INVALID_REQUEST, DEADLINE_EXCEEDED, MODEL_NOT_FOUND, FORBIDDEN, OVERLOADED),
        *(QUARANTINED, INTERNAL, NO_WORKER, UNAUTHENTICATED),
    )
}
# Errors of HTTP itself, which have no gRPC counterpart, by status. Their bodies have the same shape.
PROTOCOL = {
    400: HttpError(400, "bad_http", _INVALID, _INVALID),
    404: HttpError(404, "not_found", _INVALID, "not_found_error"),
    405: HttpError(405, "method_not_allowed", _INVALID, _INVALID),
    408: HttpError(408, "request_timeout", _INVALID, "timeout_error"),
    413: HttpError(413, "request_too_large", _INVALID, "request_too_large"),
    414: HttpError(414, "uri_too_long", _INVALID, _INVALID),
    415: HttpError(415, "unsupported_media_type", _INVALID, _INVALID),
    417: HttpError(417, "expectation_failed", _INVALID, _INVALID),
    431: HttpError(431, "headers_too_large", _INVALID, _INVALID),
    501: HttpError(501, "not_implemented", _INVALID, _INVALID),
}


def row_of(refused: RequestRefused) -> HttpError:
    """The row of a refusal. A reason of a newer version gets the row of its code; an unknown code, INTERNAL's."""
    return TABLE.get(refused.reason) or _BY_CODE.get(refused.code) or TABLE[INTERNAL]


def status_of(refused: RequestRefused) -> int:
    """The HTTP status of a refusal."""
    return row_of(refused).status


def openai_body(refused: RequestRefused) -> bytes:
    """OpenAI's error object, as JSON."""
    return body_for("", refused, "")


def body_for(path: str, refused: RequestRefused, request_id: str) -> bytes:
    """The error object in the shape of the API that the path belongs to, as JSON."""
    return _body(path, row_of(refused), refused.message, request_id, refused.field)


def protocol_body(status: int, message: str, path: str, request_id: str) -> bytes:
    """The body of an error of HTTP itself, an entry of PROTOCOL, in the shape of the path's API.  path: "" if it is not
    known"""
    return _body(path, PROTOCOL[status], message, request_id)


def _body(path: str, row: HttpError, message: str, request_id: str, field: str = "") -> bytes:
    if len(message) > MAX_MESSAGE_CHARACTERS:
        message = message[:MAX_MESSAGE_CHARACTERS] + "…"
    body: dict[str, object] = {
        "error": {"message": message, "type": row.type, "param": field or None, "code": row.code}
    }
    if is_anthropic(path):
        error: dict[str, object] = {"type": row.anthropic_type, "message": message}
        if field == THREAD:
            error["details"] = _NO_THREADS
        body = {"type": "error", "error": error, "request_id": request_id}
    # ASCII only: a quoted input may have characters, such as lone surrogates, that UTF-8 cannot express.
    return json.dumps(body, separators=(",", ":")).encode()


def refusal_headers(refused: RequestRefused) -> list[Header]:
    """Retry-After in seconds, rounded up, and retry-after-ms, if a retry makes sense; x-should-retry: false if clients
    would retry a request that cannot succeed, or wait for longer than MAX_RETRY_DELAY_MS; WWW-Authenticate if
    credentials are missing or wrong."""
    delay_ms = refused.retry_delay_ms
    headers = []
    if delay_ms:
        headers += [(b"retry-after", b"%d" % math.ceil(delay_ms / 1e3)), (b"retry-after-ms", b"%d" % delay_ms)]
    is_final = refused.reason in FINAL or (refused.reason == QUOTA_EXCEEDED and not delay_ms)
    if is_final or delay_ms > MAX_RETRY_DELAY_MS:
        headers.append((b"x-should-retry", b"false"))
    if refused.reason == UNAUTHENTICATED:
        headers.append((b"www-authenticate", b"Bearer"))
    return headers


def is_anthropic(path: str) -> bool:
    """Whether a path belongs to Anthropic's API, whose errors have another shape than OpenAI's."""
    return path == ANTHROPIC_PATH or path.startswith((f"{ANTHROPIC_PATH}/", f"{ANTHROPIC_PATH}?"))
