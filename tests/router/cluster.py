"""A router in this process before fake workers, and a client's view of it: all over real gRPC on free ports."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any, Protocol, TypedDict, Unpack, cast

import grpc
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, QuotaFailure, RetryInfo
from grpc_status.rpc_status import from_call

from tests.router.fake_worker import FakeWorker
from tests.router.integrity import check_pools
from trunkline.grant import GrantKeys
from trunkline.v1.fleet_pb2_grpc import FleetServiceStub, add_FleetServiceServicer_to_server
from trunkline.v1.inference_pb2 import GenerateRequest, GenerateResponse, TokenIds
from trunkline.v1.inference_pb2_grpc import InferenceServiceStub, add_InferenceServiceServicer_to_server
from trunkline_router.access.access import Access, Tenants
from trunkline_router.access.gate.request_gate import RequestGate
from trunkline_router.access.gate.request_size import MAX_REQUEST_BYTES
from trunkline_router.edge.fleet_service import UNREAD_S, FleetService
from trunkline_router.edge.http.server import HttpServer
from trunkline_router.edge.http_call import Edge
from trunkline_router.edge.inference_service import InferenceService
from trunkline_router.edge.live.fleet_endpoints import FleetEndpoints
from trunkline_router.edge.live.page_files import PageFiles
from trunkline_router.edge.responses.response_store import ResponseStore
from trunkline_router.http_app import http_app
from trunkline_router.observe.metrics.collector import collector
from trunkline_router.observe.metrics.request_metrics import RequestCounts
from trunkline_router.observe.recent.recent_requests import RecentRequests
from trunkline_router.observe.recent.router_requests import RouterRequests
from trunkline_router.observe.watch.fleet_sampler import Periods
from trunkline_router.observe.watch.fleet_watch import FleetWatch
from trunkline_router.observe.watch.worker_drain import WorkerDrain
from trunkline_router.prompts.helper_pool import RENDER_LIMIT_S, Helpers
from trunkline_router.quotas.fleet import PoolFleet
from trunkline_router.quotas.shared_state import SharedState
from trunkline_router.record.refused_calls import RefusedCalls
from trunkline_router.record.request_observer import RequestObserver
from trunkline_router.request.client_buffer import Backlog
from trunkline_router.request.failover import FailoverLimits
from trunkline_router.request.inference import Inference
from trunkline_router.request.placement import Dispatcher
from trunkline_router.request.prepare import ModelAliases
from trunkline_router.routing.route_request import PolicyName, RoutingPolicy
from trunkline_router.workers.connected_worker import ConnectedWorker
from trunkline_router.workers.link_context import LinkContext, LinkLimits
from trunkline_router.workers.pool import Pools
from trunkline_router.workers.tokenizer_pool import Tokenizers
from trunkline_router.workers.worker_link import WorkerLink
from trunkline_runtime.channel import open_channel
from trunkline_runtime.loop_lag import LoopLag
from trunkline_runtime.server import GrpcServer
from trunkline_runtime.telemetry.exposition import Collect, FreshAnswers
from trunkline_runtime.telemetry.process_families import CertificateExpiry, ProcessMetrics

SERVICE = "trunkline.v1.InferenceService"
PERIODS = Periods(watched_s=0.05, idle_s=60.0, answers_s=0.02)
PATIENCE_S = 60.0  # for things that take milliseconds: only a failing test waits this long


class Cluster:
    """`stub` and `fleet` call the router; `connected(i)` is what the router knows of worker i."""

    def __init__(
        self,
        links: list[WorkerLink],
        stub: Any,
        fleet: Any,
        port: int,
        shared: SharedState,
        inference: Inference,
        service: InferenceService,
        gate: RequestGate,
        counted: RequestCounts,
        collect: Collect,
        http: HttpServer | None,
        watch: FleetWatch,
    ) -> None:
        self.counted = counted
        self.collect = collect
        self.http = http
        self.http_port = 0 if http is None else http.port
        self.inference = inference
        self.service = service
        self.gate = gate
        self.watch = watch
        self.links = links
        self.stub = stub
        self.fleet = fleet
        self.port = port
        self.shared = shared

    def connected(self, index: int) -> ConnectedWorker:
        connected = self.links[index].worker
        assert connected is not None
        return connected

    async def until_workers(self, *ready: bool) -> None:
        """Waits until exactly these workers are connected."""
        await until(lambda: tuple(link.worker is not None for link in self.links) == ready)

    def generate(self, prompt: Any, *, timeout_s: float | None = PATIENCE_S, **fields: Any) -> Any:
        """The call; a prompt is text or token ids."""
        kind: dict[str, Any] = {"text": prompt} if isinstance(prompt, str) else {"token_ids": TokenIds(ids=prompt)}
        return self.stub.Generate(GenerateRequest(**kind, **fields), timeout=timeout_s)

    async def answer(self, prompt: Any, **fields: Any) -> list[GenerateResponse]:
        return [response async for response in self.generate(prompt, **fields)]

    def assert_idle(self) -> None:
        """No trace of any request is left: a count that missed its end would keep a worker from being chosen."""
        for link in self.links:
            if link.worker is not None:
                assert (link.worker.open_choices, link.worker.queued_tokens) == (0, 0)
                assert link.worker.session.num_open == 0
                assert not link.worker.blocks._index._expecting[link.worker.blocks.slot]


def share_with_nobody(pools: Pools, rng: Random) -> SharedState:
    """As a router without a Redis has it."""
    return SharedState(None, "router", PoolFleet(pools), rng)


EdgeOf = Callable[[Inference, Access, RequestGate], Edge]


class Options(TypedDict, total=False):
    """Of a router before fake workers; router_before() has their defaults."""

    max_choices: int
    seed: int
    expected: tuple[bool, ...] | None
    tenants: Tenants | None
    access: Access | None
    render_limit_s: float
    link_limits: LinkLimits | None
    failover: FailoverLimits | None
    clock_s: Callable[[], float]
    policy: PolicyName
    grant_key: bytes
    previous_key: bytes
    share: Callable[[Pools, Random], SharedState]
    backlog: Backlog | None
    edge: EdgeOf | None
    store: ResponseStore | None
    recent: RecentRequests | None
    page_folder: Path | None
    observer: RequestObserver | None
    refused: RefusedCalls | None
    name: str
    unread_s: float
    aliases: ModelAliases | None
    enforces_calls: bool


@asynccontextmanager
async def cluster(*workers: FakeWorker, **options: Unpack[Options]) -> AsyncIterator[Cluster]:
    """Starts everything, waits until all workers (or the `expected` ones) are ready, and ends everything.

    Checks that no trace of a request is left over.
    """
    async with AsyncExitStack() as stack:
        for worker in workers:
            await worker.start()
            stack.push_async_callback(worker.die)
        yield await stack.enter_async_context(router_before(*workers, **options))


class Addressed(Protocol):
    """A worker that runs."""

    @property
    def address(self) -> str: ...


@asynccontextmanager
async def router_before(
    *workers: Addressed,
    max_choices: int = 4,
    seed: int = 0,
    expected: tuple[bool, ...] | None = None,
    tenants: Tenants | None = None,
    access: Access | None = None,
    render_limit_s: float = RENDER_LIMIT_S,
    link_limits: LinkLimits | None = None,
    failover: FailoverLimits | None = None,
    clock_s: Callable[[], float] = time.monotonic,
    policy: PolicyName = PolicyName.PREDICTED_TTFT,
    grant_key: bytes = b"",
    previous_key: bytes = b"",
    share: Callable[[Pools, Random], SharedState] = share_with_nobody,
    backlog: Backlog | None = None,
    edge: EdgeOf | None = None,
    store: ResponseStore | None = None,
    recent: RecentRequests | None = None,
    page_folder: Path | None = None,
    observer: RequestObserver | None = None,
    refused: RefusedCalls | None = None,
    name: str = "router-1",
    unread_s: float = UNREAD_S,
    aliases: ModelAliases | None = None,
    enforces_calls: bool = False,
) -> AsyncIterator[Cluster]:
    """The same before workers that run already; `share` makes what it may share with other routers, and `edge`, such as
    Edge itself, the HTTP endpoints, which run only with it."""
    async with AsyncExitStack() as stack:
        rng = Random(seed)
        helpers = Helpers(render_limit_s=render_limit_s)
        stack.push_async_callback(helpers.close)
        tokenizers = Tokenizers(helpers)
        pools = Pools(rng, RoutingPolicy(policy))
        limits = link_limits or LinkLimits()
        keys = GrantKeys(grant_key, previous_key)
        context = LinkContext(name, tokenizers, pools.index, pools.notify, rng, limits, keys)
        links = [WorkerLink(worker.address, context) for worker in workers]
        pools.links = links
        access = access or Access(tenants)
        gate = RequestGate(access, refused=refused)
        server = GrpcServer(
            "127.0.0.1",
            0,
            services=[SERVICE, "trunkline.v1.FleetService"],
            max_request_bytes=MAX_REQUEST_BYTES,
            gate=gate,
        )
        dispatcher = Dispatcher(pools, clock_s, rng, limits=failover, backlog=backlog)
        shared = share(pools, rng)
        await shared.start()
        stack.push_async_callback(shared.close)
        stack.push_async_callback(_cancel, [asyncio.create_task(shared.run())])
        counted, recent = RequestCounts(access.tenants), recent or RecentRequests()
        observer = observer or RequestObserver(listeners=[counted.request_ended, recent.request_ended])
        inference = Inference(
            dispatcher,
            max_choices=max_choices,
            shared=shared,
            observer=observer,
            aliases=aliases,
            enforces_calls=enforces_calls,
        )
        service = InferenceService(inference, access, grant_keys=keys)
        add_InferenceServiceServicer_to_server(service, server.grpc)
        requests = RouterRequests(recent, observer.running, name, num_others=lambda: len(shared.neighbours))
        watch = FleetWatch(pools, shared, access.tenants, requests, PERIODS)
        stack.push_async_callback(_cancel, [asyncio.create_task(watch.run())])
        drain = WorkerDrain(pools)
        add_FleetServiceServicer_to_server(
            FleetService(inference.preparer, access, watch, drain, unread_s=unread_s), server.grpc
        )
        await server.start()
        stack.push_async_callback(server.stop, 0)
        collect = collector(counted, inference, gate, ProcessMetrics("router", LoopLag(), CertificateExpiry()))
        http: HttpServer | None = None
        if edge is not None:
            answers = FreshAnswers(collect)
            page = FleetEndpoints(watch, drain, PageFiles(page_folder) if page_folder else PageFiles())
            app = http_app(edge(inference, access, gate), lambda: bool(pools.models()), answers, page, store)
            http = HttpServer(app, "127.0.0.1", 0, refused=gate.refused)
            await http.start()
            stack.push_async_callback(http.stop, 0)
        tasks = [asyncio.create_task(link.run()) for link in links]
        stack.push_async_callback(_cancel, tasks)
        channel = await stack.enter_async_context(open_channel(f"127.0.0.1:{server.port}"))
        stubs = InferenceServiceStub(channel), FleetServiceStub(channel)
        made = Cluster(links, *stubs, server.port, shared, inference, service, gate, counted, collect, http, watch)
        await made.until_workers(*(expected or (True for _ in workers)))
        yield made
        await until(lambda: all(link.worker is None or not link.worker.open_choices for link in links))
        made.assert_idle()
        check_pools(pools)


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    """Waits for something that another task is about to do."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110  # what is waited for has no event of its own
            await asyncio.sleep(0.002)


class Refusal:
    """The status that a call ended with."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        self.code = error.code()
        self.message = error.details() or ""
        self.reason = self.field = self.quota = ""
        self.retry_s: float | None = None
        status = from_call(cast("grpc.Call", error))  # which it is in all that is read
        for detail in status.details if status is not None else ():
            info, bad, retry, quota = ErrorInfo(), BadRequest(), RetryInfo(), QuotaFailure()
            if detail.Unpack(info):
                self.reason = info.reason
            elif detail.Unpack(bad):
                self.field = bad.field_violations[0].field
            elif detail.Unpack(quota):
                self.quota = quota.violations[0].subject
            elif detail.Unpack(retry):
                self.retry_s = retry.retry_delay.ToNanoseconds() / 1e9


async def refusal(call: Any) -> Refusal:
    """How a call that must not succeed ends."""
    try:
        if isinstance(call, grpc.aio.UnaryStreamCall):
            while await call.read() is not grpc.aio.EOF:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return Refusal(error)
    raise AssertionError("the call succeeded")


def tokens_of(responses: list[GenerateResponse], index: int = 0) -> list[int]:
    return [t for response in responses for c in response.chunks if c.index == index for t in c.token_ids]
