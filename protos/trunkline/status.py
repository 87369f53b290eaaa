"""The errors of the contract: their reasons and codes, and the exception that carries them.

Importing this module does not import grpc, because pure code (scheduler, validation) uses it to refuse requests.
"""

from trunkline.v1.generation_pb2 import RequestError

ERROR_DOMAIN = "trunkline.dev"  # the domain of google.rpc.ErrorInfo

# Numbers of google.rpc.Code
CODE_INVALID_ARGUMENT = 3
CODE_DEADLINE_EXCEEDED = 4
CODE_NOT_FOUND = 5
CODE_PERMISSION_DENIED = 7
CODE_RESOURCE_EXHAUSTED = 8
CODE_FAILED_PRECONDITION = 9
CODE_INTERNAL = 13
CODE_UNAVAILABLE = 14
CODE_UNAUTHENTICATED = 16

# Reasons of google.rpc.ErrorInfo
INVALID_REQUEST = "INVALID_REQUEST"
CONTEXT_LENGTH_EXCEEDED = "CONTEXT_LENGTH_EXCEEDED"
MODEL_NOT_FOUND = "MODEL_NOT_FOUND"
REQUEST_NOT_FOUND = "REQUEST_NOT_FOUND"  # of calls that tell of requests
WORKER_NOT_FOUND = "WORKER_NOT_FOUND"  # of calls that name a worker
UNAUTHENTICATED = "UNAUTHENTICATED"
FORBIDDEN = "FORBIDDEN"
OVERLOADED = "OVERLOADED"
QUOTA_EXCEEDED = "QUOTA_EXCEEDED"
NO_WORKER = "NO_WORKER"
DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
QUARANTINED = "QUARANTINED"
INTERNAL = "INTERNAL"

_CODES = {
    INVALID_REQUEST: CODE_INVALID_ARGUMENT,
    CONTEXT_LENGTH_EXCEEDED: CODE_INVALID_ARGUMENT,
    MODEL_NOT_FOUND: CODE_NOT_FOUND,
    REQUEST_NOT_FOUND: CODE_NOT_FOUND,
    WORKER_NOT_FOUND: CODE_NOT_FOUND,
    UNAUTHENTICATED: CODE_UNAUTHENTICATED,
    FORBIDDEN: CODE_PERMISSION_DENIED,
    OVERLOADED: CODE_RESOURCE_EXHAUSTED,
    QUOTA_EXCEEDED: CODE_RESOURCE_EXHAUSTED,
    NO_WORKER: CODE_UNAVAILABLE,
    DEADLINE_EXCEEDED: CODE_DEADLINE_EXCEEDED,
    QUARANTINED: CODE_FAILED_PRECONDITION,
    INTERNAL: CODE_INTERNAL,
}


def code_of(reason: str) -> int | None:
    """The code of a reason; None if the reason is unknown, because it comes from a newer version."""
    return _CODES.get(reason)


class RequestRefused(Exception):
    """A request ends with an error instead of an answer.

    `code` is a number of google.rpc.Code, `reason` one of the constants above, `message` a sentence for a person,
    `field` the invalid field (INVALID_ARGUMENT), `retry_delay_ms` the time until a retry makes sense (0: does not
    apply), `quota` the tenant and kind of a used-up quota (QUOTA_EXCEEDED, which only routers raise).
    """

    def __init__(
        self, code: int, reason: str, message: str, *, field: str = "", retry_delay_ms: int = 0, quota: str = ""
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.field = field
        self.retry_delay_ms = retry_delay_ms
        self.quota = quota

    def to_proto(self) -> RequestError:
        return RequestError(
            code=self.code,
            reason=self.reason,
            message=self.message,
            field=self.field,
            retry_delay_ms=self.retry_delay_ms,
        )

    @classmethod
    def from_proto(cls, error: RequestError) -> "RequestRefused":
        return cls(error.code, error.reason, error.message, field=error.field, retry_delay_ms=error.retry_delay_ms)


def invalid(field: str, message: str) -> RequestRefused:
    """A refusal with INVALID_ARGUMENT that names the invalid field."""
    return RequestRefused(CODE_INVALID_ARGUMENT, INVALID_REQUEST, f"{field}: {message}", field=field)


def unauthenticated(message: str) -> RequestRefused:
    """A refusal with UNAUTHENTICATED."""
    return RequestRefused(CODE_UNAUTHENTICATED, UNAUTHENTICATED, message)


def forbidden(message: str, *, field: str = "") -> RequestRefused:
    """A refusal with PERMISSION_DENIED and the reason FORBIDDEN."""
    return RequestRefused(CODE_PERMISSION_DENIED, FORBIDDEN, message, field=field)


def context_exceeded(message: str, field: str = "prompt") -> RequestRefused:
    """A refusal because of more tokens than the model's context or the worker's memory can ever hold."""
    return RequestRefused(CODE_INVALID_ARGUMENT, CONTEXT_LENGTH_EXCEEDED, message, field=field)


def no_worker(message: str, retry_delay_ms: int = 1000) -> RequestRefused:
    """A refusal because no worker can serve the request now. A retry may succeed."""
    return RequestRefused(CODE_UNAVAILABLE, NO_WORKER, message, retry_delay_ms=retry_delay_ms)


def internal(request_id: str) -> RequestRefused:
    """What a client is told of a bug: the request's id, under which the log of the server has the rest."""
    message = f"an internal error; the server's log has it under request {request_id}"
    return RequestRefused(CODE_INTERNAL, INTERNAL, message)


def deadline_exceeded() -> RequestRefused:
    return RequestRefused(CODE_DEADLINE_EXCEEDED, DEADLINE_EXCEEDED, "the request's deadline has passed")
