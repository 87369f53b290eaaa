"""The requests of a router: of this process, and of the others that serve its ports."""

from trunkline.status import CODE_NOT_FOUND, REQUEST_NOT_FOUND, RequestRefused
from trunkline.v1.fleet_pb2 import GetRequestResponse, RequestSummary
from trunkline_router.watch.request_book import Kind, RequestBook
from trunkline_router.watch.sibling_requests import SiblingRequests
from trunkline_router.watch.viewer import Viewer


class FleetRequests:
    """book: of this process;  siblings: of the others; None: there are none"""

    def __init__(self, book: RequestBook, siblings: SiblingRequests | None = None) -> None:
        self.book = book
        self._siblings = siblings

    async def find(self, viewer: Viewer, request_id: str, tenant: str) -> GetRequestResponse:
        """Returns a request's timeline. Raises RequestRefused (REQUEST_NOT_FOUND) if there is none that the viewer may
        see."""
        found = self.book.find(viewer, request_id, tenant)
        if found is None and self._siblings is not None:
            found = await self._siblings.find(viewer, request_id, tenant)
        if found is None:
            message = f"no recent request {request_id[:128]!r} is known here"
            raise RequestRefused(CODE_NOT_FOUND, REQUEST_NOT_FOUND, message)
        return found

    async def list(self, viewer: Viewer, kind: Kind, most: int, tenant: str = "") -> list[RequestSummary]:
        """Returns at most `most` requests that the viewer may see, newest first; of running ones, those that have run
        for the longest."""
        listed = self.book.list(viewer, kind, most, tenant)
        if self._siblings is None:
            return listed
        for others in await self._siblings.lists(viewer, kind, most, tenant):
            listed += others.requests
        if kind is Kind.RUNNING:
            return sorted(listed, key=lambda summary: summary.started_unix_ms)[:most]
        return sorted(listed, key=_ended_unix_ms, reverse=True)[:most]


def _ended_unix_ms(summary: RequestSummary) -> float:
    return summary.started_unix_ms + 1e3 * summary.e2e_s
