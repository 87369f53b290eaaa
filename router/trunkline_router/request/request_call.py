"""A client's request with its caller, before the request is checked."""

import string
import uuid
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from trunkline.metadata import SESSION_KEY, only_value
from trunkline.status import invalid
from trunkline.v1.inference_pb2 import GenerateRequest
from trunkline.validation import session_problem
from trunkline_router.access.access import Access, Context, Metadata
from trunkline_router.access.caller import Caller
from trunkline_router.access.identity.identity import Role
from trunkline_router.record.request_observer import new_record
from trunkline_router.record.request_record import GRPC, RequestRecord
from trunkline_router.request.prepared_request import PreparedRequest

MAX_REQUEST_ID = 128
BYTES_PER_TOKEN = 4  # of English text; other text has more tokens
REQUEST_ID_CHARACTERS = frozenset(string.ascii_letters + string.digits + string.punctuation)

OnAdmission = Callable[[PreparedRequest], Awaitable[None]]
TimeLeft = Callable[[], float | None]  # seconds until the request's deadline; None: it has no deadline


@dataclass(frozen=True, slots=True)
class Extras:
    """What a protocol may ask of the shared path beside a GenerateRequest.

    token_ids: the prompt, in place of the request's: to put a million ids into a message would hold the event loop
    special_tokens: a prompt that is a text gets the model's special tokens
    on_admission: called once the request is within its tenant's quotas, before a worker gets it; may refuse it, and
        then nothing is charged
    """

    token_ids: "array[int] | None" = None
    special_tokens: bool = True
    on_admission: OnAdmission | None = None


NO_EXTRAS = Extras()


@dataclass(frozen=True, slots=True)
class RequestCall:
    """A request and the call that brought it, over any protocol.

    metadata: the call's metadata or headers, with names in lower case
    record: what became of the request so far
    """

    request: GenerateRequest
    record: RequestRecord
    caller: Caller
    metadata: Metadata
    time_left: TimeLeft
    extras: Extras = NO_EXTRAS

    @classmethod
    def of(
        cls, request: GenerateRequest, context: Context, access: Access, rpc: str, role: Role = Role.USER
    ) -> "RequestCall":
        """Returns the request of a call of `rpc` (its full name) that needs `role`. Raises RequestRefused
        (UNAUTHENTICATED, FORBIDDEN)."""
        caller, metadata = access.admitted(context, role), context.invocation_metadata()
        return cls(request, new_record(request_id_of(request), GRPC, rpc), caller, metadata, context.time_remaining)

    @property
    def request_id(self) -> str:
        """The client's; a new one if the client sets none, or one that cannot be logged."""
        return self.record.request_id

    def check_request_id(self) -> None:
        """Raises RequestRefused (INVALID_REQUEST) if the client's request id cannot be logged."""
        if not _can_be_logged(self.request.request_id):
            raise invalid("request_id", f"must be at most {MAX_REQUEST_ID} printable ASCII characters without spaces")

    def likely_prompt_tokens(self) -> int:
        """Returns about how many tokens the prompt has, before it is tokenized: exactly, if it is given as tokens."""
        if self.extras.token_ids is not None:
            return len(self.extras.token_ids)
        if self.request.HasField("token_ids"):
            return len(self.request.token_ids.ids)
        return self.request.ByteSize() // BYTES_PER_TOKEN  # a copy of a text would have to be decoded

    def affinity_key(self) -> str:
        """Returns a key that is equal for requests of one tenant and one session, "" if the call names no session.

        Raises RequestRefused (INVALID_REQUEST).
        """
        session = only_value(self.metadata, SESSION_KEY)
        if problem := session_problem(session):
            raise invalid(SESSION_KEY, problem)
        return f"{self.caller.tenant}\0{session}" if session else ""


def request_id_of(request: GenerateRequest) -> str:
    """Returns the request's own id, or a new one if it has none or one that cannot be logged."""
    given = request.request_id
    return given if given and _can_be_logged(given) else uuid.uuid4().hex


def _can_be_logged(request_id: str) -> bool:
    return len(request_id) <= MAX_REQUEST_ID and REQUEST_ID_CHARACTERS.issuperset(request_id)
