"""A router's connection to one worker: channel, model, cache events, session, load. Reconnects by itself."""

import asyncio
from typing import TYPE_CHECKING

import grpc

from trunkline.errors import is_too_large
from trunkline.tls_files import TlsFileError
from trunkline.v1.worker_pb2 import GetModelRequest, GetModelResponse, SessionWelcome
from trunkline.v1.worker_pb2_grpc import WorkerServiceStub
from trunkline.validation import max_total_tokens
from trunkline_router.prompts.tokenizer import TokenizerError
from trunkline_router.routing.prefix_index import WorkerBlocks
from trunkline_router.workers.breaker import WorkerBreaker
from trunkline_router.workers.cache_follower import WatchBroken
from trunkline_router.workers.cache_watch import follow_cache
from trunkline_router.workers.claims import FalseClaim, WorkerUnusable, check_model
from trunkline_router.workers.connected_worker import ConnectedWorker, WorkerCalls, WorkerTotals
from trunkline_router.workers.health_watch import WorkerHealth
from trunkline_router.workers.link_context import LinkContext, SameWorker, place_of
from trunkline_router.workers.pool_search import SILENT_AT_MOST_S, ConnectAttempts
from trunkline_router.workers.session import WorkerSession
from trunkline_runtime.channel import open_channel
from trunkline_runtime.log import get_logger

if TYPE_CHECKING:
    from trunkline.v1.worker_pb2_grpc import WorkerServiceAsyncStub  # exists in the stub file only

UNARY_TIMEOUT_S = 10.0  # for GetModel
TRIAL_AT_MOST_S = 15.0  # on trial: to fetch and build a tokenizer, and to open a session
PAUSE_FIRST_S, PAUSE_MOST_S = 0.2, 2.0  # between two attempts
ASIDE_MOST_S = 60.0  # the same after false claims: each return of the worker costs the checks again
HONEST_S = 300.0  # a false claim after a connection that lasted this long is like a first one
LOADING_S = 60.0  # a worker that was never connected may refuse this long without a warning: it loads its model
MAX_PROBLEM_CHARACTERS = 400
SERVICE = "trunkline.v1.WorkerService"
# Size limits of a message. Workers send pieces of a quarter of a MiB. Earlier versions sent 1 MiB of cache or tokenizer
# at once, and 16 MiB of outputs; one output with a prompt's log-probabilities has up to 17 MiB. Messages of WatchCache
# and Session are parsed in parts, the others at once.
MOST_BYTES = {
    "GetModel": 256 << 10,
    "GetStats": 256 << 10,
    "GetTokenizer": (1 << 20) + (4 << 10),
    "WatchCache": 2 << 20,
    "Session": 24 << 20,
}
CONNECTING, READY, DRAINING, HUNG, BROKEN, ASIDE = "connecting", "ready", "draining", "hung", "broken", "aside"
STATES = (CONNECTING, READY, DRAINING, HUNG, BROKEN, ASIDE)


class WorkerLink:
    """Keeps one worker connected. `worker` is None while no requests can be sent to it."""

    def __init__(self, address: str, context: LinkContext) -> None:
        self.address = address
        self.worker: ConnectedWorker | None = None
        self.calls: WorkerCalls | None = None  # to the connected worker
        self.wanted = True  # if False, the present connection is the last one
        self.is_named = True  # by this router's own sources, not only by another router's lease
        self.is_on_trial = False  # only a lease names it, and no worker has answered there yet
        self.same_as: WorkerLink | None = None  # the link that already has this worker by another name
        self.model: GetModelResponse | None = None  # of the last connection
        self.problem = "not connected yet"  # in one line; empty while it is connected
        self.breaker = WorkerBreaker(context.on_change)
        self.totals = WorkerTotals()
        self.connect_attempts = ConnectAttempts()
        self._context = context
        self._deadline = asyncio.Timeout(None)  # of the present trial
        self._pause_s = PAUSE_FIRST_S
        self._connected_s: float | None = None  # since when the worker is connected
        self._lasted_s: float | None = None  # the last connection; None: the last attempt has failed
        self._has_answered = False  # the worker has described its model, on whichever connection
        self._begun_s = context.clock_s()
        self._last_logged = (False, "")
        self._log = get_logger()

    async def run(self) -> None:
        """Connects, and reconnects whenever the connection ends, as long as the link is wanted."""
        while self.wanted:
            await self.connect()
            await self.connect_attempts.pause(self._pause_s * self._context.rng.uniform(0.5, 1.0))

    async def connect(self) -> float:
        """Connects once. Returns when the attempt has failed or the connection has ended: how long it lasted."""
        problem, is_refused, is_false = "closed by the worker", False, False
        self._lasted_s, holder = None, None
        try:
            async with asyncio.timeout(TRIAL_AT_MOST_S if self.is_on_trial else None) as self._deadline:
                async with self._open_channel() as channel:
                    await self._serve(channel)
        except grpc.aio.AioRpcError as error:
            problem, is_false = f"{error.code().name}: {error.details()}", is_too_large(error)
            is_refused = error.code() is grpc.StatusCode.UNAVAILABLE and not self._has_answered
        except SameWorker as same:
            holder, problem = same.holder, str(same)
        except (WorkerUnusable, WatchBroken, TokenizerError, TlsFileError, TimeoutError) as error:
            problem, is_false = str(error) or type(error).__name__, isinstance(error, FalseClaim)
        except Exception as error:  # one worker's errors must not end the router for all the others
            problem = f"unexpected {type(error).__name__}"
            self._log.error("unexpected error", address=self.address, exc_info=error)
        self.same_as, self.problem = holder, one_line(problem)
        self._log_problem(is_refused=is_refused)
        if self._lasted_s is not None and not (is_false and self._lasted_s < HONEST_S):
            self._pause_s = PAUSE_FIRST_S
        else:
            self._pause_s = min(2 * self._pause_s, ASIDE_MOST_S if is_false else PAUSE_MOST_S)
        return self._lasted_s or 0.0

    def _log_problem(self, *, is_refused: bool) -> None:
        """Logs one line per change, not per attempt."""
        may_be_loading = self.model is None and self._context.clock_s() - self._begun_s < LOADING_S
        is_expected = is_refused and may_be_loading
        has_changed = (is_expected, self.problem) != self._last_logged and not self.is_on_trial
        if self._lasted_s is not None or has_changed:
            log = self._log.info if is_expected else self._log.warning
            log("worker not connected", address=self.address, problem=self.problem)
        self._last_logged = (is_expected, self.problem)

    def _open_channel(self) -> grpc.aio.Channel:
        """Each connection reads the certificates again. Raises WorkerUnusable and TlsFileError."""
        security = self._context.security
        if problem := security.problem(self.address):
            raise WorkerUnusable(problem)
        return open_channel(self.address, service=SERVICE, most_bytes=MOST_BYTES, tls=security.tls)

    async def _serve(self, channel: grpc.aio.Channel) -> None:
        """Runs one connection. Returns or raises when it is over."""
        stub: WorkerServiceAsyncStub = WorkerServiceStub(channel)
        timeout_s = SILENT_AT_MOST_S if self.is_on_trial else UNARY_TIMEOUT_S
        model = await stub.GetModel(GetModelRequest(), timeout=timeout_s)
        self._has_answered = True
        check_model(model, self._context.grant_keys)
        with self._context.names.held(model, self, await place_of(self.address)):
            self.same_as = None
            self.connect_attempts.found(model.model)
            await self._converse(channel, stub, model)

    async def _converse(
        self, channel: grpc.aio.Channel, stub: "WorkerServiceAsyncStub", model: GetModelResponse
    ) -> None:
        tokenizer = await self._context.tokenizers.of(model, stub)
        if tokenizer.largest_id >= model.vocab_size:
            raise WorkerUnusable(
                f"the worker's tokenizer belongs to another model: it has a token {tokenizer.largest_id}, but the "
                f"model's vocab_size is {model.vocab_size}"
            )
        session = WorkerSession(
            vocab_size=model.vocab_size,
            most_tokens=max_total_tokens(model),
            most_grammar_bytes=model.max_session_grammar_bytes,
            clock_s=self._context.clock_s,
            dimensions=model.pooling.dimensions,
        )
        worker = ConnectedWorker(
            model, WorkerBlocks(self._context.index), tokenizer, session, self.breaker, self.address
        )
        opened, synced = asyncio.Event(), asyncio.Event()

        def on_open(welcome: SessionWelcome) -> None:
            if welcome.epoch != model.epoch:
                raise WatchBroken("the worker was restarted while connecting")
            if welcome.worker_id != model.worker_id:
                raise FalseClaim("the worker's session has another worker_id than its model")
            opened.set()

        proof = self._context.proof("Session", model)
        talking = asyncio.create_task(session.run(channel, self._context.router_id, on_open, proof))
        watch = asyncio.create_task(follow_cache(channel, worker, synced, self._context))
        ready = asyncio.create_task(self._announce(worker, opened, synced))
        self.calls = WorkerCalls(stub, self._context, model)
        looking = asyncio.create_task(WorkerHealth(worker, self.calls, self._context).look_after())
        try:
            done, _ = await asyncio.wait({talking, watch, looking}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if not task.cancelled():  # cancelled: a stream that broke during a write
                    task.result()
        finally:
            self.worker = self.calls = None  # before any other task runs: a worker that is lost must not be chosen
            self._note_end(worker)
            self._context.on_change()
            for task in (talking, watch, ready, looking):
                task.cancel()
            await asyncio.gather(talking, watch, ready, looking, return_exceptions=True)
            worker.blocks.close()

    def _note_end(self, worker: ConnectedWorker) -> None:
        self.totals.add(worker)
        self.connect_attempts.found(None)
        if self._connected_s is not None:
            now_s = self._context.clock_s()
            self._lasted_s, self._connected_s = now_s - self._connected_s, None
            self.totals.losses += 1
            self.breaker.on_lost(now_s, self._lasted_s)

    async def _announce(self, worker: ConnectedWorker, *conditions: asyncio.Event) -> None:
        for condition in conditions:
            await condition.wait()
        self.worker, self.model, self.problem = worker, worker.model, ""
        self.is_on_trial = False
        self._deadline.reschedule(None)
        self._connected_s = self._context.clock_s()
        self.totals.connections += 1
        self._log.info("worker connected", address=self.address, worker=worker.worker_id, model=worker.model_name,
                       blocks=len(worker.blocks))  # fmt: skip
        self._context.on_change()


def state_of(link: WorkerLink) -> str:
    """Returns the worker's state in one word, as this router sees it.

    BROKEN: requests failed there recently
    ASIDE: it differs from the other workers of its pool
    """
    worker = link.worker
    if worker is None:
        return CONNECTING
    if worker.is_hung:
        return HUNG
    if worker.load.draining:
        return DRAINING
    if worker.aside:
        return ASIDE
    return READY if link.breaker.is_closed else BROKEN


def one_line(problem: str) -> str:
    """Returns a message, which may quote the worker, as one printable line."""
    shown = "".join(c if c.isprintable() else " " for c in problem[:MAX_PROBLEM_CHARACTERS])
    return " ".join(shown.split())
