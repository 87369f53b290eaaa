"""The requests of one router, as far as a viewer may see them: of this process and, with --processes, of its siblings.

Each process answers its siblings on a Unix socket in a private directory of their parent, which no other user can
enter. A process that does not answer in time is left out: a page that lacks some requests is better than none. What
other routers have served is in their logs and in traces.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

import orjson
from google.protobuf.message import DecodeError

from trunkline.status import CODE_NOT_FOUND, REQUEST_NOT_FOUND, RequestRefused
from trunkline.v1.fleet_pb2 import GetRequestResponse, ListRequestsResponse, RequestSummary
from trunkline_router.observe.recent.recent_requests import RecentRequests, ShownRequest
from trunkline_router.observe.recent.request_views import summary_of, timeline_of
from trunkline_router.observe.recent.viewer import Viewer
from trunkline_router.record.request_record import RequestRecord
from trunkline_runtime.log import get_logger

SHOWN_ID_CHARACTERS = 128
SUFFIX = ".requests"  # of sockets
ANSWER_S = 0.25
MOST_QUESTION_BYTES = 64 << 10

Answer = TypeVar("Answer", GetRequestResponse, ListRequestsResponse)


class Kind(StrEnum):
    """Which requests are listed: ended ones; of these, notable ones; or those that have not ended."""

    ENDED = "ended"
    NOTABLE = "notable"
    RUNNING = "running"


class RouterRequests:
    """Finds and lists requests. Answers the siblings while run() runs.

    recent: the requests of this process that have ended
    running: the records of the others, the oldest first
    router: this router's name
    directory: of the sockets of this process and its siblings; None: there are no siblings
    number: of this process among them
    num_others: returns how many processes of other routers are alive
    """

    def __init__(
        self,
        recent: RecentRequests,
        running: Mapping[int, RequestRecord],
        router: str = "",
        *,
        directory: Path | None = None,
        number: int = 0,
        num_others: Callable[[], int] = lambda: 0,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.recent = recent
        self.router = router
        self.num_others = num_others
        self._running = running
        self._directory = directory
        self._own = None if directory is None else directory / f"{number}{SUFFIX}"
        self._clock_s = clock_s

    def find_here(self, viewer: Viewer, request_id: str, tenant: str = "") -> GetRequestResponse | None:
        """Finds a request among those of this process."""
        running = self._not_ended(lambda record: record.request_id == request_id)
        for request in chain(running, self.recent.newest_first()):
            if request.record.request_id == request_id and _is_seen(request.record, viewer, tenant):
                found = timeline_of(request, viewer)
                found.summary.router = self.router
                return found
        return None

    def list_here(self, viewer: Viewer, kinds: Sequence[str], most: int, tenant: str = "") -> list[RequestSummary]:
        """Returns, of each kind, at most `most` requests of this process that the viewer may see: the newest first; of
        running ones, those that have run for the longest."""
        listed = []
        for kind in kinds:
            if kind == Kind.RUNNING:
                seen = self._not_ended(lambda record: _is_seen(record, viewer, tenant))
            else:
                ended = self.recent.newest_first(only_notable=kind == Kind.NOTABLE)
                seen = (request for request in ended if _is_seen(request.record, viewer, tenant))
            listed += [summary_of(request, viewer) for request in islice(seen, most)]
        for summary in listed:
            summary.router = self.router
        return listed

    def _not_ended(self, is_wanted: Callable[[RequestRecord], bool]) -> Iterator[ShownRequest]:
        """Many run and few are looked at, so those alone are made that are wanted."""
        now_s = self._clock_s()
        return (ShownRequest(record, now_s) for record in list(self._running.values()) if is_wanted(record))

    async def find(self, viewer: Viewer, request_id: str, tenant: str = "") -> GetRequestResponse:
        """Returns the timeline of the newest request with this id, if the viewer may see it.

        tenant: only a request of this tenant; "": of any

        Raises RequestRefused (REQUEST_NOT_FOUND).
        """
        found = self.find_here(viewer, request_id, tenant)
        if found is None:
            answers = await self._ask(GetRequestResponse, viewer, request_id, tenant)
            having = [answer for answer in answers if answer.summary.request_id]
            found = max(having, key=lambda answer: answer.summary.started_unix_ms, default=None)
        if found is None:
            raise _not_found(request_id, self.num_others())
        return found

    async def list(self, viewer: Viewer, kinds: Sequence[Kind], most: int, tenant: str = "") -> list[RequestSummary]:
        """Returns the lists of all processes, one after the other; see list_here() and first_of()."""
        answers = await self._ask(ListRequestsResponse, viewer, kinds, most, tenant)
        return [*self.list_here(viewer, kinds, most, tenant), *chain.from_iterable(one.requests for one in answers)]

    async def _ask(self, kind: type[Answer], viewer: Viewer, *arguments: Any) -> Sequence[Answer]:
        """Calls the method of each sibling's book that returns this kind of answer."""
        if self._directory is None or not viewer.sees_requests:
            return []
        rights = (viewer.tenant, viewer.is_operator, viewer.sees_cache, viewer.sees_requests)
        asked = orjson.dumps((kind is GetRequestResponse, rights, arguments)) + b"\n"
        paths = [path for path in self._directory.glob(f"*{SUFFIX}") if path != self._own]
        answers = await asyncio.gather(*(_answer_of(path, asked, kind) for path in paths))
        return [answer for answer in answers if answer is not None]

    async def run(self) -> None:
        """Runs until it is cancelled."""
        assert self._own is not None
        try:
            server = await asyncio.start_unix_server(self._answer, self._own, limit=MOST_QUESTION_BYTES)
        except OSError as error:  # a path of more than 107 bytes, for example
            get_logger().warning("the requests of this process are unknown to the router's others", problem=str(error))
            await asyncio.Event().wait()
            return
        async with server:
            await server.serve_forever()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(TimeoutError, OSError, ValueError, TypeError):  # also what is no question
            async with asyncio.timeout(ANSWER_S):
                is_for_one, rights, arguments = orjson.loads(await reader.readline())
                viewer = Viewer(*rights)
                if is_for_one:
                    answer = self.find_here(viewer, *arguments) or GetRequestResponse()
                    writer.write(answer.SerializeToString())
                else:
                    listed = self.list_here(viewer, *arguments)
                    writer.write(ListRequestsResponse(requests=listed).SerializeToString())
                await writer.drain()
        writer.close()


def _is_seen(record: RequestRecord, viewer: Viewer, tenant: str) -> bool:
    return viewer.may_see(record.tenant) and tenant in ("", record.tenant)


async def _answer_of(path: Path, asked: bytes, kind: type[Answer]) -> Answer | None:
    """The answer of one process; None if it has died, or is too slow."""
    with contextlib.suppress(TimeoutError, OSError, DecodeError):
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                writer.write(asked)
                return kind.FromString(await reader.read())
            finally:
                writer.close()
    return None


def first_of(kind: Kind, summaries: Iterable[RequestSummary], most: int) -> Sequence[RequestSummary]:
    """Returns the first `most` of the requests that a list of this kind has, from the lists of several processes."""
    is_running = kind is Kind.RUNNING
    fitting = [summary for summary in summaries if summary.is_running == is_running]
    if is_running:
        return sorted(fitting, key=lambda summary: summary.started_unix_ms)[:most]
    return sorted(fitting, key=_ended_unix_ms, reverse=True)[:most]


def _ended_unix_ms(summary: RequestSummary) -> float:
    return summary.started_unix_ms + 1e3 * summary.e2e_s


def _not_found(request_id: str, num_others: int) -> RequestRefused:
    message = f"no recent request {request_id[:SHOWN_ID_CHARACTERS]!r} is known here"
    if num_others:
        message += (
            f"; other router processes ({num_others}) are alive and are not asked: the request's log line and trace "
            "name the router that served it"
        )
    return RequestRefused(CODE_NOT_FOUND, REQUEST_NOT_FOUND, message)
