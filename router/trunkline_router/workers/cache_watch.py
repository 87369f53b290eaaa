"""Follows a worker's WatchCache stream, and subscribes again when it breaks."""

import asyncio
import time
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from trunkline.errors import is_too_large
from trunkline.v1.worker_pb2 import WatchCacheRequest, WatchCacheResponse
from trunkline_router.workers.cache_follower import MOST_BLOCKS, CacheFollower, ClearsLeft, Work
from trunkline_router.workers.claims import FalseClaim, load_problem
from trunkline_router.workers.connected_worker import ConnectedWorker
from trunkline_router.workers.link_context import LinkContext
from trunkline_runtime.log import get_logger
from trunkline_runtime.wire import NotAMessage, fields

METHOD = "/trunkline.v1.WorkerService/WatchCache"
UNSEEN_BYTES = 32 << 10  # a message up to this size is parsed unchecked: about a millisecond, whatever it contains
# In one message. A step has one for each sequence that stored blocks, and those for evicted blocks.
MOST_EVENTS = 4096
_EVENTS = WatchCacheResponse.EVENTS_FIELD_NUMBER
SUBSCRIBE_AGAIN_S = 0.2
TURN_S = 0.001  # time on a worker's events before other tasks run


async def follow_cache(
    channel: grpc.aio.Channel, worker: ConnectedWorker, synced: asyncio.Event, context: LinkContext
) -> None:
    """Follows the worker's cache and load until it is cancelled, and sets `synced` once a snapshot is complete.

    After a gap or a broken stream it subscribes again. Meanwhile requests go on, and the blocks that are known stay in
    use until the new snapshot arrives. Raises WatchBroken on a new epoch, and FalseClaim if the worker sends what
    cannot be true; both end the connection.
    """
    log = get_logger()
    clears = ClearsLeft()
    most_blocks = 2 * worker.model.kv_blocks if worker.model.kv_blocks else MOST_BLOCKS
    while True:
        problem = "cache events ended"
        follower = CacheFollower(worker.blocks, worker.model.epoch, clears, min(most_blocks, MOST_BLOCKS))
        watch: Any = channel.unary_stream(METHOD, request_serializer=WatchCacheRequest.SerializeToString)
        call = watch(WatchCacheRequest(stride=1), metadata=context.proof("WatchCache", worker.model))
        try:
            async for raw in call:
                item = parsed(raw)
                now_s = context.clock_s()
                worker.num_watched += 1
                clears.renew(now_s)
                if item.WhichOneof("item") == "load":
                    if claim := load_problem(item.load):
                        raise FalseClaim(claim)
                    accepts = worker.accepts
                    worker.take_load(item.load, now_s)
                    if worker.accepts != accepts:
                        context.on_change()
                elif await in_turns(follower.work(item)):
                    worker.heard(now_s)
                else:
                    problem = "cache events have a gap"
                    break
                if follower.synced:
                    synced.set()
        except grpc.aio.AioRpcError as error:
            if is_too_large(error):
                raise FalseClaim("the worker sends more about its cache in one message than a router accepts") from None
            problem = f"cache events broke off: {error.code().name}"
        finally:
            call.cancel()
        # If the worker itself is gone, its session has ended too, and this task is cancelled here.
        await asyncio.sleep(SUBSCRIBE_AGAIN_S * context.rng.uniform(0.5, 1.0))
        log.warning("subscribing to cache events again", address=worker.address, problem=problem)


def parsed(raw: bytes) -> WatchCacheResponse:
    """Parses one item of the stream. Raises FalseClaim if it is invalid, or has more events than a step can have: each
    takes a hundred bytes once parsed."""
    try:
        if len(raw) > UNSEEN_BYTES:
            for number, _, at, end in fields(raw):
                if number == _EVENTS and any(count > MOST_EVENTS for count, _ in enumerate(fields(raw, at, end), 1)):
                    raise FalseClaim(f"the worker sends more than {MOST_EVENTS} cache events at once")
        return WatchCacheResponse.FromString(raw)
    except (DecodeError, NotAMessage):
        raise FalseClaim("the worker sent something as a cache event that is not a message") from None


async def in_turns(work: Work) -> bool:
    """Returns the result of the work. Other tasks run every TURN_S."""
    begun_s = time.perf_counter()
    while True:
        try:
            next(work)
        except StopIteration as end:
            return bool(end.value)
        if time.perf_counter() - begun_s > TURN_S:
            await asyncio.sleep(0)
            begun_s = time.perf_counter()
