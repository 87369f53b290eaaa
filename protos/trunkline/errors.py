"""The errors that a client can catch.

TrunklineError
├── InvalidRequest            a field is wrong: .field names it
│   └── ContextLengthExceeded
├── ModelNotFound
├── RequestNotFound           of calls that tell of requests
├── WorkerNotFound            of calls that name a worker
├── NotAllowed
│   ├── Unauthenticated       the key is missing, wrong or expired
│   └── Forbidden             the key is valid, but may not do this
├── TryAgain                  .retry_after_s is the time to wait
│   ├── Overloaded            the queue is full, or a quota is used up
│   └── NoWorker              no worker can serve it now
├── DeadlineExceeded
├── Quarantined
└── InternalError
"""

import grpc
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from grpc_status.rpc_status import from_call

from trunkline import status


class TrunklineError(Exception):
    """A request was refused or broke off.

    `reason` is one of trunkline.status, and empty if no server answered. `request_id` names the request in the servers'
    logs; it is empty for calls other than generate() and complete().
    """

    def __init__(
        self,
        message: str,
        *,
        reason: str = "",
        field: str = "",
        retry_after_s: float | None = None,
        request_id: str = "",
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.field = field
        self.retry_after_s = retry_after_s
        self.request_id = request_id


class InvalidRequest(TrunklineError):
    pass


class ContextLengthExceeded(InvalidRequest):
    pass


class ModelNotFound(TrunklineError):
    pass


class RequestNotFound(TrunklineError):
    pass


class WorkerNotFound(TrunklineError):
    pass


class NotAllowed(TrunklineError):
    pass


class Unauthenticated(NotAllowed):
    pass


class Forbidden(NotAllowed):
    pass


class TryAgain(TrunklineError):
    pass


class Overloaded(TryAgain):
    pass


class NoWorker(TryAgain):
    pass


class DeadlineExceeded(TrunklineError):
    pass


class Quarantined(TrunklineError):
    pass


class InternalError(TrunklineError):
    pass


_BY_REASON: dict[str, type[TrunklineError]] = {
    status.INVALID_REQUEST: InvalidRequest,
    status.CONTEXT_LENGTH_EXCEEDED: ContextLengthExceeded,
    status.MODEL_NOT_FOUND: ModelNotFound,
    status.REQUEST_NOT_FOUND: RequestNotFound,
    status.WORKER_NOT_FOUND: WorkerNotFound,
    status.UNAUTHENTICATED: Unauthenticated,
    status.FORBIDDEN: Forbidden,
    status.OVERLOADED: Overloaded,
    status.QUOTA_EXCEEDED: Overloaded,
    status.NO_WORKER: NoWorker,
    status.DEADLINE_EXCEEDED: DeadlineExceeded,
    status.QUARANTINED: Quarantined,
    status.INTERNAL: InternalError,
}

FailedCall = grpc.aio.AioRpcError | grpc.Call  # the latter is what grpc.RpcError is, too, in the blocking API

# gRPC's own text for a message over the receiver's limit. The status is RESOURCE_EXHAUSTED without details.
TOO_LARGE = "message larger than max"

# For a status without details, from grpc itself or a proxy.
_BY_CODE: dict[grpc.StatusCode, type[TrunklineError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: ModelNotFound,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: Forbidden,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAVAILABLE: NoWorker,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.FAILED_PRECONDITION: Quarantined,
    grpc.StatusCode.INTERNAL: InternalError,
}


def is_too_large(call: FailedCall) -> bool:
    """Whether gRPC itself ended the call because a message exceeded its receiver's limit. gRPC receives such a message
    in full before it ends the call."""
    return call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and TOO_LARGE in (call.details() or "")


def error_of(call: FailedCall) -> TrunklineError:
    """The exception for a failed call of either of gRPC's APIs."""
    reason, field, retry_after_s = "", "", None
    details = from_call(call)  # type: ignore[arg-type]  # reads code, details and trailing metadata only
    for packed in details.details if details is not None else ():
        info, bad, retry = ErrorInfo(), BadRequest(), RetryInfo()
        if packed.Unpack(info):
            reason = info.reason
        elif packed.Unpack(bad) and bad.field_violations:
            field = bad.field_violations[0].field
        elif packed.Unpack(retry):
            retry_after_s = retry.retry_delay.ToMilliseconds() / 1000
    kind = _BY_REASON.get(reason) or _BY_CODE.get(call.code(), TrunklineError)
    if not reason and is_too_large(call):
        kind = InvalidRequest  # a retry would not help
    return kind(call.details() or call.code().name, reason=reason, field=field, retry_after_s=retry_after_s)
