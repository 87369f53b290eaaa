"""The requests of one router process, as far as a viewer may see them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import chain, islice

from trunkline.v1.fleet_pb2 import GetRequestResponse, RequestSummary
from trunkline_router.observe.lookup.request_story import story, summary
from trunkline_router.observe.lookup.viewer import Viewer
from trunkline_router.observe.recent.recent_requests import RecentRequests
from trunkline_router.observe.recent.told_request import ToldRequest
from trunkline_router.record.request_record import RequestRecord


class Kind(StrEnum):
    """Which requests are listed: ended ones; of these, notable ones; or those that have not ended."""

    ENDED = "ended"
    NOTABLE = "notable"
    RUNNING = "running"


class RequestBook:
    """Finds requests.

    recent: those that have ended
    running: the records of the others, the oldest first
    router: this process's name
    """

    def __init__(
        self,
        recent: RecentRequests,
        running: Mapping[int, RequestRecord],
        clock_s: Callable[[], float],
        router: str = "",
    ) -> None:
        self.recent = recent
        self._running = running
        self._clock_s = clock_s
        self._router = router

    def find(self, viewer: Viewer, request_id: str, tenant: str = "") -> GetRequestResponse | None:
        """Returns the timeline of the newest request with this id; None if there is none that the viewer may see.

        tenant: only a request of this tenant; "": of any
        """
        running = self._told(record for record in self._not_ended() if record.request_id == request_id)
        for told in chain(running, self.recent.newest_first()):
            if told.record.request_id == request_id and _is_seen(told.record, viewer, tenant):
                found = story(told, viewer)
                found.summary.router = self._router
                return found
        return None

    def list(self, viewer: Viewer, kind: Kind, most: int, tenant: str = "") -> list[RequestSummary]:
        """Returns requests that the viewer may see, newest first; of running ones, those that have run for the
        longest."""
        if kind is Kind.RUNNING:
            seen = self._told(record for record in self._not_ended() if _is_seen(record, viewer, tenant))
        else:
            ended = self.recent.newest_first(only_notable=kind is Kind.NOTABLE)
            seen = (told for told in ended if _is_seen(told.record, viewer, tenant))
        listed = [summary(told, viewer) for told in islice(seen, most)]
        for shown in listed:
            shown.router = self._router
        return listed

    def _not_ended(self) -> Iterator[RequestRecord]:
        return iter(list(self._running.values()))

    def _told(self, records: Iterable[RequestRecord]) -> Iterator[ToldRequest]:
        """Running requests. Many run and few are looked at, so only those are given that the viewer gets."""
        now_s = self._clock_s()
        return (ToldRequest(record, now_s) for record in records)


def _is_seen(record: RequestRecord, viewer: Viewer, tenant: str) -> bool:
    return viewer.may_see(record.tenant) and tenant in ("", record.tenant)


def first_of(kind: Kind, summaries: Iterable[RequestSummary], most: int) -> Sequence[RequestSummary]:
    """Returns the first `most` of the requests that a list of this kind has, from the lists of several processes."""
    is_running = kind is Kind.RUNNING
    fitting = [summary for summary in summaries if summary.is_running == is_running]
    if is_running:
        return sorted(fitting, key=lambda summary: summary.started_unix_ms)[:most]
    return sorted(fitting, key=_ended_unix_ms, reverse=True)[:most]


def _ended_unix_ms(summary: RequestSummary) -> float:
    return summary.started_unix_ms + 1e3 * summary.e2e_s
