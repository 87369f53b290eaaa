"""`trunkline-router`: the edge before the workers."""

import asyncio
import contextlib
import sys
import time
from random import Random

import uvloop

from trunkline.v1.fleet_pb2_grpc import add_FleetServiceServicer_to_server
from trunkline.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from trunkline_router.dispatch import Dispatcher
from trunkline_router.failover import FailoverLimits
from trunkline_router.fleet_service import FleetService
from trunkline_router.policies import RoutingPolicy
from trunkline_router.pool import Pools
from trunkline_router.render_pool import RenderPool
from trunkline_router.service import InferenceService
from trunkline_router.settings import RouterSettings, address_problem
from trunkline_router.tenants import Tenants, TenantsError, read_tenants
from trunkline_router.worker_link import LinkLimits, Tokenizers, WorkerLink
from trunkline_runtime.log import configure_logging, get_logger
from trunkline_runtime.server import GrpcServer, PortInUse, Signals
from trunkline_runtime.settings import load_settings
from trunkline_runtime.tracing import configure_tracing, shutdown_tracing

SERVICE = "trunkline.v1.InferenceService"
FLEET_SERVICE = "trunkline.v1.FleetService"

EXIT_CANNOT_START = 2
LAST_WORDS_S = 0.5  # for what the last requests have written to reach their clients


def main() -> None:
    settings = load_settings(RouterSettings, sys.argv[1:], prog="trunkline-router", description=__doc__ or "")
    problem = address_problem(settings.workers)
    if problem is not None:
        print(f"trunkline-router: {problem}", file=sys.stderr)
        sys.exit(EXIT_CANNOT_START)
    router_id = settings.router_id or f"{settings.host}:{settings.port}"
    configure_logging("router", router=router_id)
    configure_tracing("trunkline-router")
    status = 0
    try:
        uvloop.run(serve(settings, router_id, read_tenants(settings.tenants)))
    except (PortInUse, TenantsError) as error:
        print(f"trunkline-router: {error}", file=sys.stderr)
        status = EXIT_CANNOT_START
    shutdown_tracing()
    sys.exit(status)


async def serve(settings: RouterSettings, router_id: str, tenants: Tenants) -> None:
    """Serves until a signal. Raises PortInUse."""
    log = get_logger()
    signals = Signals()
    rng = Random()
    pools = Pools(rng, RoutingPolicy(settings.policy))
    server = GrpcServer(settings.host, settings.port, services=[SERVICE, FLEET_SERVICE])
    renderers = RenderPool()
    tokenizers = Tokenizers(renderers)
    limits = LinkLimits(settings.inter_token_timeout_s, settings.slow_start_s)
    pools.links = [
        WorkerLink(address, router_id, tokenizers, pools.index, pools.notify, rng, limits=limits)
        for address in dict.fromkeys(settings.workers)
    ]
    dispatcher = Dispatcher(pools, time.monotonic, rng, limits=FailoverLimits(settings.max_resumptions))
    service = InferenceService(dispatcher, max_choices=settings.max_choices, tenants=tenants)
    add_InferenceServiceServicer_to_server(service, server.grpc)
    fleet = FleetService(pools, max_choices=settings.max_choices, tenants=tenants)
    add_FleetServiceServicer_to_server(fleet, server.grpc)
    await server.start()
    log.info("router listening", port=server.port, workers=list(settings.workers))

    async def follow_readiness() -> None:
        """Ready while at least one worker is."""
        while True:
            changed = pools.change()
            await server.set_ready(bool(pools.models()))
            await changed.wait()

    following = asyncio.create_task(follow_readiness())
    tasks = [following, *(asyncio.create_task(link.run()) for link in pools.links)]
    stopped = asyncio.create_task(signals.stop.wait())
    try:
        done, _ = await asyncio.wait({stopped, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # only a bug ends a link or the readiness loop: then it is raised here
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
        await renderers.close()
        log.info("router stopped")


if __name__ == "__main__":
    main()
