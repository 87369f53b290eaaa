"""What watchers of the fleet get, over gRPC and HTTP alike, and how many may watch at the same time."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from trunkline.status import CODE_RESOURCE_EXHAUSTED, OVERLOADED, RequestRefused, invalid
from trunkline.v1.fleet_pb2 import (
    FleetHistory,
    GetRequestResponse,
    HistoryPoint,
    ListRequestsResponse,
    QuotaView,
    RouterView,
    TenantView,
    WatchFleetResponse,
)
from trunkline_router.access.access import Caller, Tenants
from trunkline_router.observe.recent.router_requests import Kind, RouterRequests, first_of
from trunkline_router.observe.recent.viewer import Viewer
from trunkline_router.observe.watch.fleet_sampler import KEEPS_S, FleetSample, FleetSampler, Periods
from trunkline_router.observe.watch.prefix_view import prefixes_view
from trunkline_router.observe.watch.worker_tile import tile_for
from trunkline_router.quotas.shared_state import SharedState
from trunkline_router.workers.pool import Pools

MOST_OF_CALLER = 8  # of one identity, whatever tenants it acts for
MOST_OF_USERS = 48
MOST_WATCHERS = 64  # in all: what is left is for operators
RETRY_MS = 5000
MOST_TENANTS = 100
SHOWN_REQUESTS, SHOWN_RUNNING = 30, 10  # in each message
LISTED_REQUESTS, MOST_LISTED = 100, 500

SharedView = tuple[WatchFleetResponse, dict[str, Any]]  # shown and json of FleetView


class Watchers:
    """Counts watchers. `any` is set while there is one."""

    def __init__(self) -> None:
        self._of_caller: Counter[str] = Counter()
        self.any = asyncio.Event()

    @property
    def num_open(self) -> int:
        return self._of_caller.total()

    @contextmanager
    def watching(self, identity: str, *, is_operator: bool) -> Iterator[None]:
        """Counts one watcher while the context is open. Raises RequestRefused (OVERLOADED) if there are too many."""
        most = MOST_WATCHERS if is_operator else MOST_OF_USERS
        if self._of_caller[identity] >= MOST_OF_CALLER:
            raise _refusal(f"this caller has {MOST_OF_CALLER}")
        if self.num_open >= most:
            raise _refusal(f"{self.num_open} are open")
        self._of_caller[identity] += 1
        self.any.set()
        try:
            yield
        finally:
            self._of_caller[identity] -= 1
            self._of_caller = +self._of_caller  # without those that have none left
            if not self._of_caller:
                self.any.clear()


def _refusal(reason: str) -> RequestRefused:
    message = f"too many watch the fleet already: {reason}"
    return RequestRefused(CODE_RESOURCE_EXHAUSTED, OVERLOADED, message, retry_delay_ms=RETRY_MS)


def tenants_view(
    shared: SharedState, tenants: Tenants, refused: Mapping[str, int], viewer: Viewer
) -> Sequence[TenantView]:
    """Returns the tenants that the viewer may see: those with the most running requests and refusals first.

    refused: requests that were refused lately, by tenant; 0 for other tenants that have sent requests lately
    """
    if not viewer.sees_requests:
        return []
    running = shared.running
    rows = [(viewer.tenant, viewer.terms, viewer.is_listed)]
    if viewer.is_operator:
        names = {*tenants.named, *running, *refused, *shared.tenants_with_use()}
        chosen = sorted(names, key=lambda name: (-running.get(name, 0), -refused.get(name, 0), name))[:MOST_TENANTS]
        rows = [(name, tenants.terms(name), tenants.lists(name)) for name in chosen]
    return [
        TenantView(
            tenant=name,
            running=running.get(name, 0),
            weight=terms.weight,
            lane=terms.cap,
            quotas=[
                QuotaView(quota=quota, limit=limit, used=used)
                for quota, limit, used in shared.used(name, is_listed=is_listed).against(terms.quotas)
            ],
            refused=refused.get(name, 0),
        )
        for name, terms, is_listed in rows
    ]


@dataclass(slots=True)
class FleetView:
    """One message to one watcher. `shown` is made once for all viewers with the same rights, and has no points of the
    history: those are the watcher's own.

    json: of `shown`, by field; empty until a watcher wants it
    """

    shown: WatchFleetResponse
    json: dict[str, Any]
    points: list[HistoryPoint]
    is_first: bool

    def message(self) -> WatchFleetResponse:
        """Returns the whole message."""
        whole = WatchFleetResponse()
        whole.CopyFrom(self.shown)
        whole.history.points.extend(self.points)
        return whole


class FleetWatch:
    """The state of the fleet and of recent requests."""

    def __init__(
        self,
        pools: Pools,
        shared: SharedState,
        tenants: Tenants,
        requests: RouterRequests,
        periods: Periods | None = None,
    ) -> None:
        self._pools = pools
        self._shared = shared
        self._tenants = tenants
        self.requests = requests
        self._started_s = time.monotonic()
        self._version = version("trunkline")
        self.watchers = Watchers()
        self.sampler = FleetSampler(pools, self.watchers.any, requests.recent.predicted, periods)
        self.run = self.sampler.run
        self._views: dict[Viewer, asyncio.Task[SharedView]] = {}  # of the sample with this number:
        self._views_of = 0

    async def views(self, caller_of: Callable[[], Caller]) -> AsyncGenerator[FleetView, None]:
        """Yields the state now and after each later sample. A slow reader misses samples: nothing is kept for it.

        caller_of: checks the caller's credentials again; called for each view. What it raises ends the watch

        Raises RequestRefused (OVERLOADED) if too many watch.
        """
        caller = caller_of()
        viewer = Viewer.of(caller)
        with self.watchers.watching(caller.identity.name, is_operator=viewer.is_operator):
            number = 0
            while True:
                sample = await self.sampler.after(number)
                viewer = Viewer.of(caller_of())
                points = self.sampler.history.since(number) if viewer.is_operator else []
                shown, json = await self._view(viewer, sample)
                yield FleetView(shown, json, points, is_first=not number)
                number = sample.number

    async def list_requests(
        self, caller: Caller, limit: int, tenant: str, kind: Kind = Kind.ENDED
    ) -> ListRequestsResponse:
        """Returns recent requests that the caller may see. Raises RequestRefused (INVALID_REQUEST)."""
        if limit > MOST_LISTED:
            raise invalid("limit", f"must be at most {MOST_LISTED}")
        most = limit or LISTED_REQUESTS
        listed = await self.requests.list(Viewer.of(caller), (kind,), most, tenant)
        return ListRequestsResponse(requests=first_of(kind, listed, most))

    async def request(self, caller: Caller, request_id: str, tenant: str) -> GetRequestResponse:
        """Returns the timeline of a recent request. Raises RequestRefused (REQUEST_NOT_FOUND) if there is none that the
        caller may see."""
        return await self.requests.find(Viewer.of(caller), request_id, tenant)

    async def _view(self, viewer: Viewer, sample: FleetSample) -> SharedView:
        """Everything but the history's points; made once for viewers with equal rights."""
        if self._views_of != sample.number:
            self._views, self._views_of = {}, sample.number
        made = self._views.get(viewer)
        if made is None:
            made = self._views[viewer] = asyncio.create_task(self._make_view(viewer, sample))
        return await asyncio.shield(made)  # if one watcher leaves, the others still wait for it

    async def _make_view(self, viewer: Viewer, sample: FleetSample) -> SharedView:
        listed = await self.requests.list(viewer, (Kind.ENDED, Kind.RUNNING), SHOWN_REQUESTS)
        refused = self.requests.recent.refused_by_quota()
        shown = WatchFleetResponse(
            at_unix_ms=sample.at_unix_ms,
            router=self._router(sample.now_s),
            you=viewer.rights,
            workers=[shown for tile in sample.workers if (shown := tile_for(viewer, tile)) is not None],
            history=FleetHistory(keeps_s=KEEPS_S),
            prefixes=prefixes_view(self._pools, viewer, sample.now_s),
            requests=first_of(Kind.ENDED, listed, SHOWN_REQUESTS),
            running=first_of(Kind.RUNNING, listed, SHOWN_RUNNING),
            tenants=tenants_view(self._shared, self._tenants, refused, viewer),
        )
        return shown, {}

    def _router(self, now_s: float) -> RouterView:
        link = self._shared.link
        return RouterView(
            name=self.requests.router,
            version=self._version,
            uptime_s=now_s - self._started_s,
            policy=self._pools.policy.name,
            redis="none" if link is None else "ok" if link.is_reachable else "lost",
            open_requests=sum(self._shared.running.values()),
            watchers=self.watchers.num_open,
            other_routers=self.requests.num_others(),
        )
