"""A client's call of Generate, Grant or ExplainRoute, before its request is checked."""

import string
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc

from trunkline.metadata import SESSION_KEY, only_value
from trunkline.status import invalid
from trunkline.v1.inference_pb2 import GenerateRequest
from trunkline.validation import session_problem

MAX_REQUEST_ID = 128
REQUEST_ID_CHARACTERS = frozenset(string.ascii_letters + string.digits + string.punctuation)

Context = grpc.aio.ServicerContext[Any, Any]
CallMetadata = Iterable[tuple[str, str | bytes]] | None
TimeLeft = Callable[[], float | None]  # seconds until the request's deadline; None: it has no deadline


@dataclass(frozen=True, slots=True)
class RequestCall:
    """A request and the call that brought it.

    request_id: the client's; a new one if the client sets none, or one that cannot be logged
    log_fields: for the request's log line and span; filled in as they become known
    """

    request: GenerateRequest
    request_id: str
    metadata: CallMetadata
    time_left: TimeLeft
    log_fields: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, request: GenerateRequest, context: Context) -> "RequestCall":
        given = request.request_id
        request_id = given if given and _can_be_logged(given) else uuid.uuid4().hex
        return cls(request, request_id, context.invocation_metadata(), context.time_remaining)

    def check_request_id(self) -> None:
        """Raises RequestRefused (INVALID_REQUEST) if the client's request id cannot be logged."""
        if not _can_be_logged(self.request.request_id):
            raise invalid("request_id", f"must be at most {MAX_REQUEST_ID} printable ASCII characters without spaces")

    def affinity_key(self, tenant: str) -> str:
        """Returns a key that is equal for requests of one tenant and one session, "" if the call names no session.

        Raises RequestRefused (INVALID_REQUEST).
        """
        session = only_value(self.metadata, SESSION_KEY)
        if problem := session_problem(session):
            raise invalid(SESSION_KEY, problem)
        return f"{tenant}\0{session}" if session else ""


def _can_be_logged(request_id: str) -> bool:
    return len(request_id) <= MAX_REQUEST_ID and REQUEST_ID_CHARACTERS.issuperset(request_id)
