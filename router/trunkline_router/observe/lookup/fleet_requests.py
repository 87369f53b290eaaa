"""The requests of a fleet: of this process, of the others that serve this router's ports, and of other routers."""

from collections.abc import Callable, Iterable, Sequence

from trunkline.status import CODE_NOT_FOUND, REQUEST_NOT_FOUND, RequestRefused
from trunkline.v1.fleet_pb2 import GetRequestResponse, ListRequestsResponse, OtherRouters, RequestSummary
from trunkline_router.observe.lookup.question import Answer, Heard, Question
from trunkline_router.observe.lookup.request_book import Kind, RequestBook, first_of
from trunkline_router.observe.lookup.router_lookup import RouterLookup
from trunkline_router.observe.lookup.sibling_requests import SiblingRequests
from trunkline_router.observe.lookup.viewer import Viewer

SHOWN_ID_CHARACTERS = 128


class FleetRequests:
    """book: of this process
    siblings: of the other processes of this router; None: there are none
    routers: asks the other routers of the fleet; None: it cannot, or there are none
    num_unasked: returns how many other routers are alive that cannot be asked
    """

    def __init__(
        self,
        book: RequestBook,
        siblings: SiblingRequests | None = None,
        routers: RouterLookup | None = None,
        num_unasked: Callable[[], int] = lambda: 0,
    ) -> None:
        self.book = book
        self._num_unasked = num_unasked
        self._siblings = siblings
        self._routers = routers

    @property
    def asks_routers(self) -> bool:
        """Whether it asks other routers at all."""
        return self._routers is not None

    async def ask_routers(self, question: Question) -> Heard:
        """Returns what the other routers of the fleet answer."""
        if self._routers is None or not question.may_have_answer:
            return Heard((), OtherRouters())
        return await self._routers.ask(question)

    async def _ask_siblings(self, question: Question) -> Sequence[Answer]:
        if self._siblings is None or not question.may_have_answer:
            return ()
        return await self._siblings.ask(question)

    async def find(self, viewer: Viewer, request_id: str, tenant: str) -> GetRequestResponse:
        """Returns a request's timeline. Other routers are asked only if this one does not have it. Raises
        RequestRefused (REQUEST_NOT_FOUND) if there is none that the viewer may see."""
        question = Question(viewer, tenant, request_id)
        found = self.book.find(viewer, request_id, tenant)
        if found is None:
            found = _newest(await self._ask_siblings(question))
        if found is not None:
            return found
        heard = await self.ask_routers(question)
        found = _newest(heard.answers)
        if found is None:
            raise _not_found(request_id, heard.routers, self._num_unasked())
        return found

    async def near(self, question: Question) -> list[RequestSummary]:
        """Returns the lists of this router's processes, one after the other."""
        viewer, tenant = question.viewer, question.tenant
        listed = [shown for kind in question.kinds for shown in self.book.list(viewer, kind, question.most, tenant)]
        return listed + summaries(await self._ask_siblings(question))

    async def list(self, viewer: Viewer, kind: Kind, most: int, tenant: str = "") -> ListRequestsResponse:
        """Returns at most `most` requests that the viewer may see, newest first; of running ones, those that have run
        for the longest."""
        question = Question(viewer, tenant, kinds=(kind,), most=most)
        heard = await self.ask_routers(question)
        listed = [*await self.near(question), *summaries(heard.answers)]
        return ListRequestsResponse(requests=first_of(kind, listed, most), others=heard.routers)


def summaries(answers: Iterable[Answer]) -> list[RequestSummary]:
    """Returns the requests of several lists."""
    return [shown for answer in answers if isinstance(answer, ListRequestsResponse) for shown in answer.requests]


def _newest(answers: Iterable[Answer]) -> GetRequestResponse | None:
    stories = (answer for answer in answers if isinstance(answer, GetRequestResponse))
    return max(stories, key=lambda story: story.summary.started_unix_ms, default=None)


def _not_found(request_id: str, routers: OtherRouters, num_unasked: int) -> RequestRefused:
    message = f"no recent request {request_id[:SHOWN_ID_CHARACTERS]!r} is known here"
    silent = routers.alive - routers.answered
    if num_unasked:
        message += (
            f"; the fleet's other router processes ({num_unasked}) are not asked, because the fleet has no secret, "
            "no grant key and no password of Redis"
        )
    elif silent > 0:
        message += f"; of the fleet's other router processes, {silent} of {routers.alive} did not answer"
    elif routers.alive:
        message += f", nor at the fleet's other router processes ({routers.alive})"
    return RequestRefused(CODE_NOT_FOUND, REQUEST_NOT_FOUND, message)
