"""FleetService: a router's RPCs for operators; users see their own part of some.

ExplainRoute and ListWorkers must not reveal one tenant's prompts to another. The number of cached blocks would tell
whether a prompt was new, so it is left out. Numbers that depend on waiting or running requests are rounded to one
significant digit. WatchFleet and GetRequest have the exact numbers, for operators alone (`observe/recent/viewer.py`).
"""

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager

from trunkline.status import CODE_RESOURCE_EXHAUSTED, OVERLOADED, RequestRefused, forbidden
from trunkline.v1 import fleet_pb2
from trunkline.v1.fleet_pb2 import (
    DrainWorkerRequest,
    DrainWorkerResponse,
    ExplainRouteRequest,
    ExplainRouteResponse,
    GetRequestRequest,
    GetRequestResponse,
    ListRequestsRequest,
    ListRequestsResponse,
    ListWorkersRequest,
    ListWorkersResponse,
    RouteCandidate,
    UndrainWorkerRequest,
    UndrainWorkerResponse,
    WatchFleetRequest,
    WatchFleetResponse,
    WorkerStatus,
)
from trunkline.v1.fleet_pb2_grpc import FleetServiceServicer
from trunkline.v1.worker_pb2 import LoadSample
from trunkline_router.access.access import Access, Context
from trunkline_router.access.identity.needed_roles import WATCHERS
from trunkline_router.observe.recent.router_requests import Kind
from trunkline_router.observe.watch.fleet_watch import FleetWatch
from trunkline_router.observe.watch.worker_drain import WorkerDrain
from trunkline_router.observe.watch.worker_tile import shown_state
from trunkline_router.request.inference import charge_call, check_call
from trunkline_router.request.prepare import Preparer
from trunkline_router.request.request_call import RequestCall
from trunkline_router.routing.policy import Candidate
from trunkline_router.workers.worker_link import WorkerLink

EXPLAIN_RPC = "trunkline.v1.FleetService/ExplainRoute"
UNREAD_S = 60.0  # that a message of WatchFleet may wait for its client, as over HTTP
EXACT_MS = re.compile(r"\d+\.\d(?= ms)")
ACCURACY_STEP = 20  # requests, each of which found something cached
MOST_SHOWN = (1 << 32) - 1  # some fields have 32 bits


class FleetService(FleetServiceServicer):
    """Answers with the functions that requests go through, and changes no state that routing depends on.

    If no worker is connected, ExplainRoute searches for one as requests do, which brings connection attempts forward.
    DrainWorker and UndrainWorker alone change anything.

    unread_s: how long a message of WatchFleet may wait for its client
    """

    def __init__(
        self,
        preparer: Preparer,
        access: Access,
        watch: FleetWatch,
        drain: WorkerDrain,
        *,
        unread_s: float = UNREAD_S,
    ) -> None:
        self._unread_s = unread_s
        self._preparer = preparer
        self._pools = preparer.pools
        self._access = access
        self._watch = watch
        self._drain = drain

    async def ExplainRoute(self, request: ExplainRouteRequest, context: Context) -> ExplainRouteResponse:
        call = RequestCall.of(request.request, context, self._access, EXPLAIN_RPC)
        if not call.caller.identity.sees_cache:
            raise forbidden("these credentials may not see the cache, which decides the route")
        check_call(self._preparer.shared, call.caller)
        prepared = await self._preparer.prepare(call)
        await charge_call(self._preparer.shared, call.caller)
        now_s = time.monotonic()
        pool = self._pools.pool(prepared.model, needs=prepared.needs)
        workers = pool.allowed(pool.with_room(prepared.least_room(), prepared.answer_format), now_s)
        plan = self._pools.explain(workers, prepared.route_request(now_s)).plan
        return ExplainRouteResponse(
            model=pool.name,
            policy=plan.policy,
            prompt_tokens=len(prepared.prompt),
            worker_id=plan.worker_id,
            reason=EXACT_MS.sub(lambda time_ms: f"{_about_s(float(time_ms[0])):g}", plan.reason),
            candidates=[_candidate(candidate) for candidate in plan.candidates],
        )

    async def ListWorkers(self, request: ListWorkersRequest, context: Context) -> ListWorkersResponse:
        self._access.admitted()
        now_s = time.monotonic()
        workers = [worker_status(link, now_s) for link in self._pools.links]
        shown = {status.address for status in workers}
        workers += [
            WorkerStatus(address=address, state=fleet_pb2.WORKER_STATE_CONNECTING, problem=problem)
            for address, problem in self._pools.set_aside.items()
            if address not in shown
        ]
        return ListWorkersResponse(workers=workers)

    async def WatchFleet(
        self, request: WatchFleetRequest, context: Context
    ) -> AsyncGenerator[WatchFleetResponse, None]:
        metadata, peer = context.invocation_metadata(), context.peer()
        async with aclosing(self._watch.views(lambda: self._access.caller(metadata, WATCHERS, peer))) as views:
            has_begun = False
            async for view in views:
                if not has_begun:
                    # grpc.aio cannot send a status while the metadata waits together with the first message.
                    await context.send_initial_metadata(())
                    has_begun = True
                with _refused_if_unread(self._unread_s):
                    yield view.message()

    async def ListRequests(self, request: ListRequestsRequest, context: Context) -> ListRequestsResponse:
        caller = self._access.admitted()
        kind = Kind.RUNNING if request.running else Kind.NOTABLE if request.notable else Kind.ENDED
        return await self._watch.list_requests(caller, request.limit, request.tenant, kind)

    async def GetRequest(self, request: GetRequestRequest, context: Context) -> GetRequestResponse:
        caller = self._access.admitted()
        return await self._watch.request(caller, request.request_id, request.tenant)

    async def DrainWorker(self, request: DrainWorkerRequest, context: Context) -> DrainWorkerResponse:
        caller = self._access.admitted()
        timeout_s = request.timeout.ToNanoseconds() / 1e9 if request.HasField("timeout") else None
        return await self._drain.drain(request.worker, timeout_s, caller.identity.name)

    async def UndrainWorker(self, request: UndrainWorkerRequest, context: Context) -> UndrainWorkerResponse:
        caller = self._access.admitted()
        return await self._drain.undrain(request.worker, caller.identity.name)


@contextmanager
def _refused_if_unread(within_s: float) -> Iterator[None]:
    """Cancels the current call with a refusal unless the context is left in time. A call that yields a message within
    it resumes once gRPC has sent the message, for which the client's window must have room."""
    task = asyncio.current_task()
    assert task is not None, "gRPC gives each call a task"
    message = f"the client has read nothing for {within_s:g} s"
    refused = RequestRefused(CODE_RESOURCE_EXHAUSTED, OVERLOADED, message)
    timer = asyncio.get_running_loop().call_later(within_s, task.cancel, refused)
    try:
        yield
    finally:
        timer.cancel()


def worker_status(link: WorkerLink, now_s: float) -> WorkerStatus:
    """Returns a worker's state, load and accuracy, as any client may see them."""
    status = WorkerStatus(address=link.address)
    if link.model is not None:
        status.worker_id, status.epoch, status.model = link.model.worker_id, link.model.epoch, link.model.model
    status.state, status.problem = shown_state(link, now_s)
    worker = link.worker
    if worker is None:
        return status
    status.load.CopyFrom(shown_load(worker.load))
    status.open_choices = worker.open_choices
    status.index_accuracy = round(worker.accuracy.share, 1)
    status.index_accuracy_requests = worker.accuracy.num_requests // ACCURACY_STEP * ACCURACY_STEP
    status.routed_by_load = bool(worker.distrust(now_s))
    return status


def shown_load(load: LoadSample) -> LoadSample:
    """Returns a load sample as any client may see it: numbers that depend on other tenants' prompts have one
    significant digit, and blocks that hold cached prefixes count as free."""
    shown = LoadSample()
    shown.CopyFrom(load)
    shown.waiting_tokens = about(load.waiting_tokens)
    shown.waiting_uncached_tokens = about(load.waiting_uncached_tokens)
    shown.uncached_tokens_by_lane[:] = map(about, load.uncached_tokens_by_lane)
    shown.running_kv_tokens = about(load.running_kv_tokens)
    shown.step_time_us = about(load.step_time_us)
    shown.kv_live_blocks = about(load.kv_live_blocks)
    shown.kv_free_blocks = about(load.kv_free_blocks + load.kv_cached_blocks)
    shown.kv_cached_blocks = 0
    return shown


def about(number: int) -> int:
    """Returns the number rounded to one significant digit, at most MOST_SHOWN."""
    return min(int(float(f"{number:.0e}")), MOST_SHOWN)


def _about_s(time_s: float) -> float:
    return float(f"{time_s:.0e}")


def _candidate(candidate: Candidate) -> RouteCandidate:
    return RouteCandidate(
        worker_id=candidate.worker_id,
        matched_tokens=candidate.matched_tokens,
        queued_tokens=about(candidate.queued_tokens),
        running=candidate.running,
        queue_s=_about_s(candidate.queue_s),
        prefill_s=candidate.prefill_s,
        decode_s=_about_s(candidate.decode_s),
        kv_wait_s=_about_s(candidate.kv_wait_s),
        kv_penalty_s=_about_s(candidate.kv_penalty_s),
        slow_start_s=candidate.slow_start_s,
        others_s=_about_s(candidate.others_s),
        cost_s=_about_s(candidate.cost_s),
        routed_by_load=candidate.routed_by_load,
    )
