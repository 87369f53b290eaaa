"""`trunkline-router`: the edge before the workers."""

import asyncio
import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import uvloop

from trunkline.grant import grant_key_problem
from trunkline.v1.fleet_pb2_grpc import add_FleetServiceServicer_to_server
from trunkline.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from trunkline_router.api.fleet_service import FleetService
from trunkline_router.api.service import InferenceService
from trunkline_router.discovery.discovery import Membership, sources_of
from trunkline_router.dispatch.dispatch import Dispatcher
from trunkline_router.failover.failover import FailoverLimits
from trunkline_router.failover.quarantine import Quarantine
from trunkline_router.gate.freed_memory import keep_freed_memory, return_freed_memory
from trunkline_router.gate.open_calls import request_bounds
from trunkline_router.gate.request_gate import RequestGate
from trunkline_router.gate.request_size import MAX_REQUEST_BYTES
from trunkline_router.processes import EXIT_CANNOT_START, supervise
from trunkline_router.prompts.render_pool import RenderPool
from trunkline_router.prompts.tokenizer_pool import Tokenizers
from trunkline_router.request.tenants import Tenants, TenantsError, read_tenants
from trunkline_router.routing.routing_policy import RoutingPolicy
from trunkline_router.settings import RouterSettings, address_problem, sharing_problem
from trunkline_router.shared_state.fleet import Fleet
from trunkline_router.shared_state.pool_fleet import PoolFleet
from trunkline_router.shared_state.state import SharedState
from trunkline_router.stores.conviction_key import conviction_key
from trunkline_router.stores.embedded_store import EmbeddedStore
from trunkline_router.stores.redis_store import RedisStore
from trunkline_router.stores.store import Store
from trunkline_router.streaming.backlog import Backlog
from trunkline_router.workers.link_context import LinkContext, LinkLimits
from trunkline_router.workers.pool import Pools
from trunkline_router.workers.worker_link import WorkerLink
from trunkline_runtime.garbage import keep_collecting, spare_what_stays
from trunkline_runtime.log import configure_logging, get_logger
from trunkline_runtime.loop_lag import LoopLag
from trunkline_runtime.metrics import export_lag, metric_reader
from trunkline_runtime.server import GrpcServer, PortInUse, Signals
from trunkline_runtime.settings import load_settings
from trunkline_runtime.tracing import configure_tracing, shutdown_tracing
from trunkline_runtime.wake_ups import read_wake_ups_at_once

SERVICE = "trunkline.v1.InferenceService"
FLEET_SERVICE = "trunkline.v1.FleetService"

LAST_WORDS_S = 0.5  # for what the last requests have written to reach their clients


def main() -> None:
    settings = router_settings(sys.argv[1:])
    sys.exit(supervise(settings, sys.argv[1:]) if settings.processes > 1 else run(settings))


def router_settings(arguments: Sequence[str]) -> RouterSettings:
    """Exits with status 2 and one line on standard error where they make no sense."""
    settings = load_settings(RouterSettings, arguments, prog="trunkline-router", description=__doc__ or "")
    problem = (
        address_problem(settings.workers)
        or sharing_problem(settings.redis_url, settings.key_prefix)
        or grant_key_problem(settings.grant_key)
    )
    if problem is not None:
        print(f"trunkline-router: {problem}", file=sys.stderr)
        sys.exit(EXIT_CANNOT_START)
    return settings


@dataclass(frozen=True, slots=True)
class SharedPort:
    """How one of several processes joins the others on their port.

    on_listening: called once it listens
    once_useful: it listens only when it has a worker. Others serve meanwhile; a connection that led here would be of no
        use to its client
    """

    on_listening: Callable[[], None]
    once_useful: bool


def run(settings: RouterSettings, shared_port: SharedPort | None = None) -> int:
    """Serves until a signal; returns the exit status."""
    configure_logging("router", router=settings.name)
    configure_tracing("trunkline-router")
    keep_freed_memory()
    status = 0
    try:
        tenants = read_tenants(settings.tenants)
        if settings.processes > 1 and not settings.redis_url and tenants.have_quotas:
            raise TenantsError("--tenants has quotas, which several processes can only keep together with --redis-url")
        uvloop.run(serve(settings, tenants, shared_port))
    except (PortInUse, TenantsError) as error:
        print(f"trunkline-router: {error}", file=sys.stderr)
        status = EXIT_CANNOT_START
    shutdown_tracing()
    return status


def share(settings: RouterSettings, fleet: Fleet, rng: Random) -> SharedState:
    """In Redis where there is a URL, else in this process."""
    patience_s = settings.redis_patience_ms / 1e3
    if settings.redis_url:
        store: Store = RedisStore(settings.redis_url, settings.key_prefix, patience_s=patience_s)
    else:
        store = EmbeddedStore(lambda: time.monotonic() * 1e3)
    return SharedState(
        store,
        settings.name,
        fleet,
        rng,
        admits_when_down=settings.quota_when_down == "open",
        patience_s=patience_s,
    )


async def serve(settings: RouterSettings, tenants: Tenants, shared_port: SharedPort | None = None) -> None:
    """Serves until a signal. Raises PortInUse."""
    log = get_logger()
    if not read_wake_ups_at_once():
        log.warning("grpc.aio was in use already: its wake-ups are read one by one")
    signals = Signals()
    rng = Random()
    pools = Pools(rng, RoutingPolicy(settings.policy))
    gate = RequestGate(pools, request_bounds(settings.max_calls, settings.max_tenant_calls))
    server = GrpcServer(
        settings.host,
        settings.port,
        services=[SERVICE, FLEET_SERVICE],
        shared_port=shared_port is not None,
        max_connection_age_s=settings.max_connection_age_s,
        max_request_bytes=MAX_REQUEST_BYTES,
        gate=gate,
    )
    renderers = RenderPool()
    tokenizers = Tokenizers(renderers)
    grant_key = settings.grant_key.encode()
    context = LinkContext(
        settings.name,
        tokenizers,
        pools.index,
        pools.notify,
        rng,
        LinkLimits(settings.inter_token_timeout_s, settings.slow_start_s),
        grant_key,
    )
    members = Membership(pools.links, connect=lambda address: WorkerLink(address, context))
    neighbours = PoolFleet(pools)
    shared = share(settings, neighbours, rng)
    quarantine = Quarantine(conviction_key(settings.redis_url, settings.key_prefix, grant_key), shared.convictions)
    leases = neighbours.leased() if settings.redis_url and settings.follow_leases else None
    dispatcher = Dispatcher(
        pools,
        time.monotonic,
        rng,
        limits=FailoverLimits(settings.max_resumptions),
        quarantine=quarantine,
        backlog=Backlog(settings.max_unread_mib << 20),
    )
    await shared.start()
    service = InferenceService(
        dispatcher,
        max_choices=settings.max_choices,
        tenants=tenants,
        shared=shared,
        grant_key=grant_key,
    )
    add_InferenceServiceServicer_to_server(service, server.grpc)
    fleet = FleetService(pools, max_choices=settings.max_choices, shared=shared, tenants=tenants)
    add_FleetServiceServicer_to_server(fleet, server.grpc)
    sources, lookups = sources_of(settings.workers, rng)
    pools.search.lookups += lookups
    lag, reader = LoopLag(), metric_reader("trunkline-router")
    metrics = None if reader is None else export_lag(lag, "trunkline-router", reader)

    def in_and_freed() -> tuple[int, int]:
        in_requests, of_requests = gate.large_requests()
        return in_requests, of_requests + dispatcher.backlog.deferred_frees.freed_bytes

    background = (shared.run(), members.run(sources, leases), lag.run(), return_freed_memory(in_and_freed))
    tasks = [asyncio.create_task(running) for running in background]
    stopped = asyncio.create_task(signals.stop.wait())

    async def have_a_worker() -> None:
        while True:
            changed = pools.change()
            if pools.models():
                return
            await changed.wait()

    if shared_port is not None and shared_port.once_useful:
        useful = asyncio.create_task(have_a_worker())
        await asyncio.wait({stopped, useful, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        useful.cancel()
    if not signals.stop.is_set():
        await server.start()
        spare_what_stays()
        log.info("router listening", port=server.port, workers=list(settings.workers))
        if shared_port is not None:
            shared_port.on_listening()

    async def follow_readiness() -> None:
        """Ready while at least one worker is."""
        while True:
            changed = pools.change()
            await server.set_ready(bool(pools.models()))
            await changed.wait()

    following = asyncio.create_task(follow_readiness())
    tasks.append(following)
    tasks.append(asyncio.create_task(keep_collecting()))
    try:
        done, _ = await asyncio.wait({stopped, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # only a bug ends the links or the readiness loop: then it is raised here
        log.info("router stopping")
        following.cancel()  # from here on it is not ready, whatever its workers do
        await server.set_ready(False)
        idle = asyncio.create_task(service.stop_admission())
        at_once = asyncio.create_task(signals.stop_now.wait())
        await asyncio.wait({idle, at_once}, timeout=settings.stop_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        await server.stop(LAST_WORDS_S if idle.done() else 0)
    finally:
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
        await server.stop(0)
        await shared.close()
        await renderers.close()
        if metrics is not None:
            await asyncio.to_thread(metrics.shutdown)
        log.info("router stopped")


if __name__ == "__main__":
    main()
