"""A worker's WatchCache stream, from one subscription to the next."""

import asyncio
from typing import TYPE_CHECKING

import grpc

from trunkline.v1.worker_pb2 import WatchCacheRequest
from trunkline_router.cache_follower import CacheFollower
from trunkline_router.link_context import LinkContext
from trunkline_router.live import Live
from trunkline_router.model_check import FalseClaim
from trunkline_router.worker_claims import load_problem
from trunkline_runtime.log import get_logger

if TYPE_CHECKING:
    from trunkline.v1.worker_pb2_grpc import WorkerServiceAsyncStub  # exists in the stub file only

SUBSCRIBE_AGAIN_S = 0.2


async def follow_cache(stub: "WorkerServiceAsyncStub", live: Live, synced: asyncio.Event, context: LinkContext) -> None:
    """Follows the worker's cache and load until it is cancelled, and sets `synced` once a snapshot is there. A gap or a
    broken stream starts a new subscription, while requests go on and what is known stays in use until the new snapshot
    comes. A new epoch ends the connection: raises WatchBroken, and FalseClaim where
    the worker says what cannot be.
    """
    log = get_logger()
    while True:
        problem = "cache events ended"
        follower = CacheFollower(live.blocks, live.model.epoch)
        call = stub.WatchCache(WatchCacheRequest(stride=1), metadata=context.proof("WatchCache", live.model))
        try:
            async for item in call:
                now_s = context.clock_s()
                live.num_watched += 1
                if item.WhichOneof("item") == "load":
                    if claim := load_problem(item.load):
                        raise FalseClaim(claim)
                    accepts = live.accepts
                    live.take_load(item.load, now_s)
                    if live.accepts != accepts:
                        context.on_change()
                elif follower.take(item):
                    live.heard(now_s)
                else:
                    problem = "cache events have a gap"
                    break
                if follower.synced:
                    synced.set()
        except grpc.aio.AioRpcError as error:
            problem = f"cache events broke off: {error.code().name}"
        finally:
            call.cancel()
        # Where the whole worker is gone, its session has ended too and this task is cancelled here.
        await asyncio.sleep(SUBSCRIBE_AGAIN_S * context.rng.uniform(0.5, 1.0))
        log.warning("subscribing anew", address=live.address, problem=problem)
