"""Pools in this process that follow sources of addresses, and a server before them."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

from tests.router.cluster import share_with_nobody
from trunkline.v1.inference_pb2_grpc import InferenceServiceStub, add_InferenceServiceServicer_to_server
from trunkline_router.access.access import Access
from trunkline_router.access.gate.request_gate import RequestGate
from trunkline_router.edge.inference_service import InferenceService
from trunkline_router.prompts.helper_pool import Helpers
from trunkline_router.request.inference import Inference
from trunkline_router.request.placement import Dispatcher
from trunkline_router.workers.discovery import Addresses, Membership, Source, watch_name
from trunkline_router.workers.link_context import LinkContext
from trunkline_router.workers.pool import Pools
from trunkline_router.workers.tokenizer_pool import Tokenizers
from trunkline_router.workers.worker_link import WorkerLink
from trunkline_runtime.channel import open_channel
from trunkline_runtime.server import GrpcServer


class Names:
    """A DNS server whose only name has the addresses that a test says; each lookup waits until the test allows it."""

    def __init__(self) -> None:
        self.answer: Addresses | OSError = frozenset()
        self.slept_s: list[float] = []
        self._turn = asyncio.Event()
        self._waiting = asyncio.Event()

    async def resolve(self, name: str, port: int) -> Addresses:
        if isinstance(self.answer, OSError):
            raise self.answer
        return self.answer

    async def sleep(self, delay_s: float) -> None:
        self.slept_s.append(delay_s)
        self._waiting.set()
        await self._turn.wait()
        self._turn.clear()

    async def say(self, answer: Addresses | OSError) -> None:
        """From now on; returns when it has been looked up."""
        await self._waiting.wait()
        self.answer = answer
        self._waiting.clear()
        self._turn.set()
        await self._waiting.wait()

    def watch(self) -> Source:
        return watch_name("workers", 50061, Random(0), self.resolve, self.sleep)


@asynccontextmanager
async def membership(
    helpers: Helpers, *sources: Source, leases: Source | None = None, pools: Pools | None = None
) -> AsyncIterator[Pools]:
    """Pools that follow these sources with real links."""
    rng = Random(0)
    pools = pools or Pools(rng)
    context = LinkContext("router-1", Tokenizers(helpers), pools.index, pools.notify, rng)
    members = Membership(pools, lambda address: WorkerLink(address, context))
    running = asyncio.create_task(members.run(sources, leases))
    try:
        yield pools
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@asynccontextmanager
async def serving(pools: Pools) -> AsyncIterator[Any]:
    """A client's stub of a router with these pools."""
    access = Access()
    server = GrpcServer("127.0.0.1", 0, services=[], gate=RequestGate(access))
    shared = share_with_nobody(pools, Random(0))
    await shared.start()
    inference = Inference(Dispatcher(pools, time.monotonic, Random(0)), max_choices=4, shared=shared)
    service = InferenceService(inference, access)
    add_InferenceServiceServicer_to_server(service, server.grpc)
    await server.start()
    async with open_channel(f"127.0.0.1:{server.port}") as channel:
        yield InferenceServiceStub(channel)
    await server.stop(0)


def connected(pools: Pools) -> set[str]:
    return {link.address for link in pools.links if link.worker is not None}
