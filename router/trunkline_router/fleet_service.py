"""FleetService: what operators ask a router."""

import time
from typing import Any

import grpc

from trunkline.v1 import fleet_pb2
from trunkline.v1.fleet_pb2 import (
    ExplainRouteRequest,
    ExplainRouteResponse,
    ListWorkersRequest,
    ListWorkersResponse,
    RouteCandidate,
    WorkerStatus,
)
from trunkline.v1.fleet_pb2_grpc import FleetServiceServicer
from trunkline_router.edge import check_request_id, prepare, request_id_of, session_of
from trunkline_router.policy import Candidate
from trunkline_router.pool import Pools
from trunkline_router.tenants import Tenants, tenant_of
from trunkline_router.worker_link import WorkerLink

Context = grpc.aio.ServicerContext[Any, Any]


class FleetService(FleetServiceServicer):
    """Asks the same functions that requests go through, and changes nothing of what these go by. As they do,
    ExplainRoute looks for workers before it says that there is none: it hurries tries to connect that were due later.
    """

    def __init__(self, pools: Pools, *, max_choices: int, tenants: Tenants | None = None) -> None:
        self._pools = pools
        self._tenants = tenants or Tenants()
        self._max_choices = max_choices

    async def ExplainRoute(self, request: ExplainRouteRequest, context: Context) -> ExplainRouteResponse:
        wanted = request.request
        check_request_id(wanted)
        metadata = context.invocation_metadata()
        tenant = tenant_of(metadata)
        pool = await self._pools.found(wanted.model, tenant, context.time_remaining())
        prepared = await prepare(
            wanted,
            request_id_of(wanted),
            pool,
            max_choices=self._max_choices,
            scheduling=self._tenants.scheduling(tenant, wanted.lane),
            session=session_of(metadata, tenant),
        )
        now_s = time.monotonic()
        pool = self._pools.pool(pool.name)  # it may have changed meanwhile
        workers = pool.allowed(pool.with_room(prepared.least_room()), now_s)
        plan = self._pools.explain(workers, prepared.route_request(now_s)).plan
        return ExplainRouteResponse(
            model=pool.name,
            policy=plan.policy,
            prompt_tokens=len(prepared.prompt),
            worker_id=plan.worker_id,
            reason=plan.reason,
            candidates=[_candidate(candidate) for candidate in plan.candidates],
        )

    async def ListWorkers(self, request: ListWorkersRequest, context: Context) -> ListWorkersResponse:
        now_s = time.monotonic()
        return ListWorkersResponse(workers=[worker_status(link, now_s) for link in self._pools.links])


def worker_status(link: WorkerLink, now_s: float) -> WorkerStatus:
    """Where a worker stands."""
    status = WorkerStatus(address=link.address, state=fleet_pb2.WORKER_STATE_CONNECTING, problem=link.problem)
    if link.model is not None:
        status.worker_id, status.epoch, status.model = link.model.worker_id, link.model.epoch, link.model.model
    live = link.live
    if live is None:
        return status
    if live.is_hung:
        status.state, status.problem = fleet_pb2.WORKER_STATE_HUNG, "it has work, and says nothing"
    elif live.load.draining:
        status.state = fleet_pb2.WORKER_STATE_DRAINING
    elif live.aside:
        status.state, status.problem = fleet_pb2.WORKER_STATE_BROKEN, live.aside
    elif not link.breaker.is_closed:
        status.state, status.problem = fleet_pb2.WORKER_STATE_BROKEN, "requests failed there of late"
    else:
        status.state, status.problem = fleet_pb2.WORKER_STATE_READY, live.distrust(now_s)
    status.load.CopyFrom(live.load)
    status.open_choices = live.open_choices
    status.indexed_blocks = len(live.blocks)
    status.index_accuracy = live.accuracy.share
    status.index_accuracy_requests = live.accuracy.num_requests
    status.routed_by_load = bool(live.distrust(now_s))
    return status


def _candidate(candidate: Candidate) -> RouteCandidate:
    return RouteCandidate(
        worker_id=candidate.worker_id,
        matched_tokens=candidate.matched_tokens,
        queued_tokens=candidate.queued_tokens,
        running=candidate.running,
        queue_s=candidate.queue_s,
        prefill_s=candidate.prefill_s,
        decode_s=candidate.decode_s,
        kv_wait_s=candidate.kv_wait_s,
        kv_penalty_s=candidate.kv_penalty_s,
        slow_start_s=candidate.slow_start_s,
        others_s=candidate.others_s,
        cost_s=candidate.cost_s,
        routed_by_load=candidate.routed_by_load,
    )
