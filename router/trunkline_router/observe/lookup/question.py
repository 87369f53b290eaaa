"""What one router process asks another about its requests, and the answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from google.protobuf.message import DecodeError

from trunkline.v1.fleet_pb2 import GetRequestResponse, ListRequestsResponse, OtherRouters, RequestSummary
from trunkline_router.access.tenants import Tenant
from trunkline_router.observe.lookup.request_book import Kind, RequestBook
from trunkline_router.observe.lookup.viewer import Viewer

MOST_LISTED = 500
MOST_CHARACTERS = 4096  # of a request's id, of a tenant

Answer = GetRequestResponse | ListRequestsResponse


@dataclass(frozen=True, slots=True)
class Question:
    """Asks for one request by its id, or for lists of several kinds, of `most` requests each."""

    viewer: Viewer
    tenant: str = ""  # "": any
    request_id: str = ""  # "": lists
    kinds: Sequence[Kind] = ()
    most: int = 0

    @property
    def may_have_answer(self) -> bool:
        """Whether any process can have what the viewer may see of it."""
        names_fit = len(self.request_id) <= MOST_CHARACTERS and len(self.tenant) <= MOST_CHARACTERS
        return names_fit and self.viewer.sees_requests and bool(self.request_id or self.kinds)

    @property
    def most_in_all(self) -> int:
        """Most requests in the answer."""
        return 1 if self.request_id else self.most * len(self.kinds)

    def written(self) -> bytes:
        """Returns the question in one line."""
        viewer = self.viewer
        fields = {
            "viewer": [viewer.tenant, viewer.is_operator, viewer.sees_cache, viewer.sees_requests],
            "tenant": self.tenant,
            "request_id": self.request_id,
            "kinds": self.kinds,
            "most": self.most,
        }
        return orjson.dumps(fields) + b"\n"

    @classmethod
    def read(cls, line: bytes) -> "Question":
        """Reads what written() returns. Raises ValueError, KeyError or TypeError for anything else."""
        fields: dict[str, Any] = orjson.loads(line)
        tenant, *rights = fields["viewer"]
        is_operator, sees_cache, sees_requests = (_checked(right, bool) for right in rights)
        viewer = Viewer(_text(tenant), is_operator, sees_cache, sees_requests, None, Tenant(), is_listed=False)
        kinds = [Kind(kind) for kind in _checked(fields["kinds"], list)[: len(Kind)]]
        most = _checked(fields["most"], int)
        if not 0 <= most <= MOST_LISTED:
            raise ValueError(f"lists of {most}")
        return cls(viewer, _text(fields["tenant"]), _text(fields["request_id"]), tuple(dict.fromkeys(kinds)), most)

    def answer_of(self, book: RequestBook) -> bytes:
        """Returns the answer of one process; empty if it does not have the request."""
        if self.request_id:
            found = book.find(self.viewer, self.request_id, self.tenant)
            return b"" if found is None else found.SerializeToString()
        listed = [shown for kind in self.kinds for shown in book.list(self.viewer, kind, self.most, self.tenant)]
        return ListRequestsResponse(requests=listed).SerializeToString()

    def read_answer(self, answer: bytes) -> Answer | None:
        """Returns what another process answered; None if that is nothing, or no answer to this question. What the
        viewer may not see is left out: the other process may have another version."""
        try:
            if self.request_id:
                story = GetRequestResponse.FromString(answer)
                is_it = story.summary.request_id == self.request_id and self._asks_for(story.summary)
                return story if is_it else None
            listed = ListRequestsResponse.FromString(answer)
        except DecodeError:
            return None
        seen = [summary for summary in listed.requests[: self.most_in_all] if self._asks_for(summary)]
        return listed if len(seen) == len(listed.requests) else ListRequestsResponse(requests=seen)

    def _asks_for(self, summary: RequestSummary) -> bool:
        return self.viewer.may_see(summary.tenant) and self.tenant in ("", summary.tenant)


@dataclass(frozen=True, slots=True)
class Heard:
    """What the other routers of the fleet answered.  routers: how many there are, and how many answered"""

    answers: Sequence[Answer]
    routers: OtherRouters


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{type(value).__name__} in the place of {kind.__name__}")
    return value


def _text(value: Any) -> str:
    if len(_checked(value, str)) > MOST_CHARACTERS:
        raise ValueError(f"{len(value)} characters")
    return str(value)
