"""The parts of a router, made from its settings and connected to each other. Nothing runs yet."""

import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from trunkline.v1.fleet_pb2_grpc import add_FleetServiceServicer_to_server
from trunkline.v1.inference_pb2_grpc import add_InferenceServiceServicer_to_server
from trunkline_router.access.access import Access
from trunkline_router.access.gate.places import request_bounds
from trunkline_router.access.gate.request_gate import RequestGate
from trunkline_router.access.gate.request_size import MAX_REQUEST_BYTES
from trunkline_router.edge.fleet_service import FleetService
from trunkline_router.edge.http.server import LIMITS, HttpServer
from trunkline_router.edge.http_call import Edge
from trunkline_router.edge.inference_service import InferenceService
from trunkline_router.edge.live.fleet_endpoints import FleetEndpoints
from trunkline_router.edge.live.page_files import PageFiles
from trunkline_router.edge.responses.response_store import ResponseStore, StoreLimits
from trunkline_router.http_app import App, http_app, metrics_app
from trunkline_router.http_settings import HttpSettings
from trunkline_router.observe.metrics.collector import certificates_of, collector
from trunkline_router.observe.metrics.request_metrics import RequestCounts
from trunkline_router.observe.recent.recent_requests import SLOW_S, RecentRequests
from trunkline_router.observe.recent.router_requests import RouterRequests
from trunkline_router.observe.tracing.request_traces import RequestTraces
from trunkline_router.observe.watch.fleet_watch import FleetWatch
from trunkline_router.observe.watch.worker_drain import WorkerDrain
from trunkline_router.prompts.helper_pool import Helpers
from trunkline_router.quotas.fleet import PoolFleet
from trunkline_router.quotas.redis_store import RedisStore
from trunkline_router.quotas.redis_url import conviction_key
from trunkline_router.quotas.shared_state import SharedState
from trunkline_router.record.refused_calls import RefusedCalls
from trunkline_router.record.request_observer import RequestListener, RequestObserver
from trunkline_router.request.client_buffer import Backlog
from trunkline_router.request.failover import Quarantine
from trunkline_router.request.inference import Inference
from trunkline_router.request.placement import Dispatcher
from trunkline_router.request.prepare import ModelAliases
from trunkline_router.routing.route_request import RoutingPolicy
from trunkline_router.settings import METRICS_OPTION, RouterSettings
from trunkline_router.workers.discovery import Membership, sources_of
from trunkline_router.workers.link_context import LinkContext, LinkLimits, LinkSecurity
from trunkline_router.workers.pool import Pools
from trunkline_router.workers.tokenizer_pool import Tokenizers
from trunkline_router.workers.worker_link import WorkerLink
from trunkline_runtime.loop_lag import LoopLag
from trunkline_runtime.server import GrpcServer
from trunkline_runtime.telemetry.exposition import Collect, FreshAnswers
from trunkline_runtime.telemetry.process_families import ProcessMetrics
from trunkline_runtime.tls import ServerTls
from trunkline_runtime.tracing import Tracing

SERVICE = "trunkline.v1.InferenceService"
FLEET_SERVICE = "trunkline.v1.FleetService"
# Age at which a client's connection takes no further requests, and the client opens another one: so connections spread
# to processes and routers that started later.
MAX_CONNECTION_AGE_S = 600.0
MOST_SCRAPER_CONNECTIONS = 64  # at the port for metrics alone


@dataclass(frozen=True, slots=True)
class SharedPort:
    """How one of several processes joins the others on their port.

    on_listening: called once the process listens
    once_useful: the process listens only when it has a worker. Until then the other processes serve the port, and no
        client connects to one that cannot serve it
    directory: of the sockets at which the processes ask each other for requests
    number: of the process among them, from 0
    restarts: how often the process with this number was started again
    """

    on_listening: Callable[[], None]
    once_useful: bool
    directory: Path
    number: int
    restarts: int


@dataclass(frozen=True, slots=True)
class Router:
    """The parts of a router that serve() starts and stops. `background` runs for as long as the router does."""

    settings: RouterSettings
    pools: Pools
    shared: SharedState
    server: GrpcServer
    http: HttpServer | None
    metrics: HttpServer | None
    service: InferenceService
    helpers: Helpers
    collect: Collect
    background: Sequence[Callable[[], Coroutine[Any, Any, None]]]


def build(settings: RouterSettings, access: Access, tracing: Tracing, shared_port: SharedPort | None = None) -> Router:
    """Makes the parts and connects them to each other. Nothing runs yet. Needs a running event loop. Raises
    TlsFileError."""
    rng, tls = Random(), settings.tls.server_tls()
    pools = Pools(rng, RoutingPolicy(settings.policy))
    fleet = PoolFleet(pools)
    shared = share(settings, fleet, rng)
    dispatcher = _dispatcher(settings, pools, shared, rng)
    traces = traces_of(settings, tracing)
    bounds = request_bounds(settings.max_calls, settings.max_calls // 2)
    gate = RequestGate(access, bounds, RefusedCalls(None if traces is None else traces.call_refused))
    server = GrpcServer(
        settings.host,
        settings.port,
        services=[SERVICE, FLEET_SERVICE],
        shared_port=shared_port is not None,
        max_connection_age_s=MAX_CONNECTION_AGE_S,
        max_request_bytes=MAX_REQUEST_BYTES,
        gate=gate,
        tls=tls,
        health_port=settings.tls.health_port,
    )
    counted = RequestCounts(access.tenants)
    recent = RecentRequests(slow_s=settings.trace_slow_ms / 1e3 or SLOW_S)
    listeners: list[RequestListener] = [counted.request_ended, recent.request_ended]
    if traces is not None:
        listeners.insert(0, traces.request_ended)
    observer = RequestObserver(tracing.sampler, listeners, None if traces is None else traces.may_export)
    aliases = ModelAliases(settings.model_aliases)
    inference = Inference(
        dispatcher,
        max_choices=settings.max_choices,
        shared=shared,
        observer=observer,
        aliases=aliases,
        enforces_calls=settings.enforce_calls,
        reasoning_efforts=settings.reasoning_efforts,
    )
    service = InferenceService(inference, access, grant_keys=settings.grant_keys)
    add_InferenceServiceServicer_to_server(service, server.grpc)
    directory, number, restarts = None, 0, None
    if shared_port is not None:
        directory, number, restarts = shared_port.directory, shared_port.number, shared_port.restarts
    requests = RouterRequests(
        recent,
        observer.running,
        settings.name,
        directory=directory,
        number=number,
        num_others=lambda: max(0, len(shared.neighbours) - settings.processes + 1),
    )
    watch = FleetWatch(pools, shared, access.tenants, requests)
    worker_drain = WorkerDrain(pools)
    add_FleetServiceServicer_to_server(FleetService(inference.preparer, access, watch, worker_drain), server.grpc)
    store, helpers, lag = _response_store(settings.http), Helpers(), LoopLag()
    spans = None if tracing.queue is None else tracing.queue.counts
    process = ProcessMetrics("router", lag, certificates_of(settings, tls), spans)
    collect = collector(counted, inference, gate, process, restarts)
    page = FleetEndpoints(watch, worker_drain, PageFiles())
    edge = Edge(
        inference,
        access,
        gate,
        settings.http.sse_keep_alive_s,
        settings.http.allow_unknown_fields,
        settings.http.reasoning_field,
        settings.http.refuse_server_tools,
    )
    http, metrics = _http_servers(settings, edge, tls, collect, page, store, shared_port)
    background = (
        shared.run,
        _membership(settings, pools, fleet, helpers, rng),
        lag.run,
        watch.run,
        *(() if shared_port is None else (requests.run,)),
        *(() if store is None else (store.run,)),
    )
    return Router(settings, pools, shared, server, http, metrics, service, helpers, collect, background)


def traces_of(settings: RouterSettings, tracing: Tracing) -> RequestTraces | None:
    """What exports the spans of requests; None: they are not exported."""
    if tracing.queue is None:
        return None
    slow_s = settings.trace_slow_ms / 1e3 if settings.trace_slow_ms else None
    return RequestTraces(tracing.queue, slow_s, sampler=tracing.sampler)


def _response_store(http: HttpSettings) -> ResponseStore | None:
    if not http.max_stored_responses:
        return None
    limits = StoreLimits(http.max_stored_responses, http.max_stored_mib << 20, http.response_ttl_s)
    return ResponseStore(limits, time.monotonic)


def _http_servers(
    settings: RouterSettings,
    edge: Edge,
    tls: ServerTls | None,
    collect: Collect,
    page: FleetEndpoints,
    store: ResponseStore | None,
    shared_port: SharedPort | None,
) -> tuple[HttpServer | None, HttpServer | None]:
    """The HTTP server, and that of the process's metrics alone. None: the settings ask for none."""
    answers, inference = FreshAnswers(collect), edge.inference

    def is_ready() -> bool:
        return not inference.running.is_stopping and bool(inference.pools.models())

    def server(app: App, port: int, **options: Any) -> HttpServer:
        return HttpServer(
            app,
            settings.host,
            port,
            ssl_context=None if tls is None else tls.ssl_context(),
            refused=edge.gate.refused,
            limits=replace(LIMITS, keep_alive_s=settings.http.http_keep_alive_s),
            **options,
        )

    http = metrics = None
    if settings.http.http_port >= 0:
        # At a shared port a scraper would reach another process each time.
        for_scrapers = answers if shared_port is None else None
        app = http_app(edge, is_ready, for_scrapers, page, store)
        is_shared, origins = shared_port is not None, settings.http.cors_origins
        http = server(app, settings.http.http_port, shared_port=is_shared, cors_origins=origins)
    if (first := settings.process_metrics_port) >= 0:
        port = first + shared_port.number if first and shared_port is not None else first
        app = metrics_app(edge, answers)
        metrics = server(app, port, max_connections=MOST_SCRAPER_CONNECTIONS, port_option=METRICS_OPTION)
    return http, metrics


def share(settings: RouterSettings, fleet: PoolFleet, rng: Random) -> SharedState:
    """The state shared with other routers: in Redis if the settings have a URL, else in this process alone."""
    patience_s, store = settings.redis_patience_ms / 1e3, None
    if settings.redis_url:
        store = RedisStore(settings.redis_url, settings.key_prefix, patience_s=patience_s, tls=settings.redis_tls)
    is_open = settings.quota_when_down == "open"
    return SharedState(store, settings.name, fleet, rng, admits_when_down=is_open, patience_s=patience_s)


def _dispatcher(settings: RouterSettings, pools: Pools, shared: SharedState, rng: Random) -> Dispatcher:
    key = conviction_key(settings.redis_url, settings.key_prefix, settings.grant_keys.newest)
    quarantine, backlog = Quarantine(key, shared.convictions), Backlog(settings.max_unread_mib << 20)
    return Dispatcher(pools, time.monotonic, rng, quarantine=quarantine, backlog=backlog)


def _membership(
    settings: RouterSettings, pools: Pools, fleet: PoolFleet, helpers: Helpers, rng: Random
) -> Callable[[], Coroutine[Any, Any, None]]:
    """Keeps a link to each worker that the settings name and, if the router follows leases, that other routers know."""
    context = LinkContext(
        settings.name,
        Tokenizers(helpers),
        pools.index,
        pools.notify,
        rng,
        LinkLimits(settings.inter_token_timeout_s, settings.slow_start_s),
        settings.grant_keys,
        security=LinkSecurity(settings.worker_tls.client_tls(), settings.tls.allow_plaintext),
    )
    members = Membership(pools, lambda address: WorkerLink(address, context))
    sources, lookups = sources_of(settings.workers, rng)
    pools.lookups += lookups
    leases = fleet.leased() if settings.redis_url and settings.follow_leases else None
    return partial(members.run, sources, leases)
