"""A router's connection to one worker: channel, model, cache events, session, load. Reconnects by itself."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING

import grpc

from trunkline.errors import is_too_large
from trunkline.tls_files import TlsFileError
from trunkline.v1.worker_pb2 import GetModelRequest, GetModelResponse, SessionWelcome
from trunkline.v1.worker_pb2_grpc import WorkerServiceStub
from trunkline.validation import max_total_tokens
from trunkline_router.prompts.tokenizer import TokenizerError
from trunkline_router.routing.prefix_index import WorkerBlocks
from trunkline_router.workers.cache_follower import WatchBroken
from trunkline_router.workers.cache_watch import follow_cache
from trunkline_router.workers.claims import FalseClaim, WorkerUnusable, check_model, welcome_problem
from trunkline_router.workers.connected_worker import ConnectedWorker, WorkerCalls, WorkerTotals
from trunkline_router.workers.health import WorkerBreaker
from trunkline_router.workers.health_watch import WorkerHealth
from trunkline_router.workers.link_context import Link, LinkContext, SameWorker, place_of
from trunkline_router.workers.session import WorkerSession
from trunkline_runtime.channel import open_channel
from trunkline_runtime.log import get_logger

if TYPE_CHECKING:
    from trunkline.v1.worker_pb2_grpc import WorkerServiceAsyncStub  # exists in the stub file only

UNARY_TIMEOUT_S = 10.0  # for GetModel
BACKOFF_FIRST_S, BACKOFF_MOST_S = 0.2, 2.0
# Pause after a false claim. Each return of the worker costs the checks again.
ASIDE_FIRST_S, ASIDE_MOST_S = 1.0, 60.0
LOADING_S = 60.0  # a worker that was never connected may refuse this long without a warning: it loads its model
HONEST_S = 300.0  # after a connection that lasted this long, the pause is ASIDE_FIRST_S again
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
SILENT_AT_MOST_S = 1.0  # a worker that does not even refuse a connection in this time is taken for absent
ANSWERED_AT_MOST_S = 5.0  # a worker that has answered is present, but its tokenizer must be fetched and built
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
        self.same_as: Link | None = None  # the link that already has this worker by another name
        self.model: GetModelResponse | None = None  # of the last connection
        self.problem = "not connected yet"  # in one line; empty while it is connected
        self.breaker = WorkerBreaker(context.on_change)
        self.totals = WorkerTotals()
        self.connect_attempts = ConnectAttempts()
        self._context = context
        self._sweeping: asyncio.Task[None] | None = None
        self._connected_s = 0.0
        self._was_connected = False  # in the present connection
        self._has_answered = False  # the worker has described its model, on whichever connection
        self._log = get_logger()

    async def run(self) -> None:
        """Connects, and reconnects whenever the connection ends, as long as the link is wanted."""
        backoff_s, aside_s = BACKOFF_FIRST_S, ASIDE_FIRST_S
        last_logged = (False, "")
        first_attempt_s = self._context.clock_s()
        while self.wanted:
            problem = "closed by the worker"
            was_connected = is_false = is_refused = False
            holder = None
            begun_s = self._context.clock_s()
            try:
                async with self._open_channel() as channel:
                    await self._serve(channel)
            except grpc.aio.AioRpcError as error:
                problem = f"{error.code().name}: {error.details()}"
                is_false = is_too_large(error)
                is_refused = error.code() is grpc.StatusCode.UNAVAILABLE and not self._has_answered
            except SameWorker as same:
                holder, problem = same.holder, str(same)
            except (WorkerUnusable, WatchBroken, TokenizerError, TlsFileError, TimeoutError) as error:
                problem = str(error) or type(error).__name__
                is_false = isinstance(error, FalseClaim)
            except Exception as error:  # one worker's errors must not end the router for all the others
                problem = f"unexpected {type(error).__name__}"
                self._log.error("unexpected error", address=self.address, exc_info=error)
            finally:
                was_connected, self._was_connected = self._was_connected, False
                if was_connected:
                    self.totals.losses += 1
                    now_s = self._context.clock_s()
                    self.breaker.on_lost(now_s, now_s - self._connected_s)
                    self._context.on_change()
            problem = one_line(problem)
            may_be_loading = self.model is None and self._context.clock_s() - first_attempt_s < LOADING_S
            is_expected = is_refused and may_be_loading
            # One line per change, not per attempt.
            if was_connected or ((is_expected, problem) != last_logged and not self.is_on_trial):
                log = self._log.info if is_expected else self._log.warning
                log("worker not connected", address=self.address, problem=problem)
            last_logged, self.problem = (is_expected, problem), problem
            self.same_as = holder
            backoff_s = BACKOFF_FIRST_S if was_connected else min(backoff_s * 2, BACKOFF_MOST_S)
            pause_s = backoff_s
            if self._context.clock_s() - begun_s > HONEST_S:
                aside_s = ASIDE_FIRST_S
            if is_false:
                pause_s, aside_s = aside_s, min(aside_s * 2, ASIDE_MOST_S)
            await self.connect_attempts.pause(pause_s * self._context.rng.uniform(0.5, 1.0))
        if self._sweeping is not None:
            await self._sweeping

    def _open_channel(self) -> grpc.aio.Channel:
        """Each connection reads the certificates again. Raises WorkerUnusable and TlsFileError."""
        security = self._context.security
        if problem := security.problem(self.address):
            raise WorkerUnusable(problem)
        return open_channel(self.address, service=SERVICE, most_bytes=MOST_BYTES, tls=security.tls)

    async def _serve(self, channel: grpc.aio.Channel) -> None:
        """Runs one connection. Returns or raises when it is over."""
        stub: WorkerServiceAsyncStub = WorkerServiceStub(channel)
        model = await stub.GetModel(GetModelRequest(), timeout=UNARY_TIMEOUT_S)
        self._has_answered = True
        check_model(model, self._context.grant_keys)
        with self._context.names.held(model, self, await place_of(self.address)):
            self.same_as = None
            self.connect_attempts.answered(model.model)
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
        session = WorkerSession(vocab_size=model.vocab_size, most_tokens=max_total_tokens(model))
        worker = ConnectedWorker(
            model, WorkerBlocks(self._context.index), tokenizer, session, self.breaker, self.address
        )
        opened, synced = asyncio.Event(), asyncio.Event()

        def on_open(welcome: SessionWelcome) -> None:
            if welcome.epoch != model.epoch:
                raise WatchBroken("the worker was restarted while connecting")
            if problem := welcome_problem(welcome, model):
                raise FalseClaim(problem)
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
            self._context.on_change()
            self.totals.add(worker)
            self.connect_attempts.lost()
            for task in (talking, watch, ready, looking):
                task.cancel()
            await asyncio.gather(talking, watch, ready, looking, return_exceptions=True)
            worker.blocks.close()
            if self._sweeping is None or self._sweeping.done():
                self._sweeping = asyncio.create_task(self._sweep())

    async def _sweep(self) -> None:
        """Removes the lost worker's blocks from the index, while requests and another connection go on."""
        for _ in iter(self._context.index.sweep, False):
            await asyncio.sleep(0)

    async def _announce(self, worker: ConnectedWorker, *conditions: asyncio.Event) -> None:
        for condition in conditions:
            await condition.wait()
        self.worker, self.model, self.problem = worker, worker.model, ""
        self._was_connected = True
        self.totals.connections += 1
        self.connect_attempts.worked()
        self._connected_s = self._context.clock_s()
        self._log.info("worker connected", address=self.address, worker=worker.worker_id, model=worker.model_name,
                       blocks=len(worker.blocks))  # fmt: skip
        self._context.on_change()


class ConnectAttempts:
    """The attempts at one address or name. An attempt that fails ends with pause(); one that works lasts until lost().

    is_paused: no attempt is under way
    begun_s: when the present attempt began, or else the last one
    tried_s: when the latest attempt that is over began
    model: the model that the present attempt has found there
    works: the present attempt has succeeded, and what it found is not lost
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self.is_paused = False
        self.begun_s = clock_s()
        self.tried_s = -inf
        self.model: str | None = None
        self.works = False
        self._clock_s = clock_s
        self._since_s = self.begun_s  # time of the last progress
        self._hurry = asyncio.Event()
        self._changed = asyncio.Event()  # the state of the present attempt has changed

    def answered(self, model: str) -> None:
        """A worker has answered that serves this model."""
        self.model, self._since_s = model, self._clock_s()
        self._changed.set()

    def worked(self) -> None:
        """The present attempt has succeeded."""
        self.works = True
        self._changed.set()

    def lost(self) -> None:
        """What the attempt found is lost: another attempt is about to begin."""
        self.works = False
        self.model, self._since_s = None, self._clock_s()
        self._changed.set()

    async def pause(self, pause_s: float) -> None:
        """An attempt is over. Returns when the next one should begin."""
        self.is_paused, self.model, self.tried_s = True, None, self.begun_s
        self._changed.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._hurry.wait()
        self._hurry.clear()
        self.is_paused = False
        self.begun_s = self._since_s = self._clock_s()
        self._changed.set()

    def hurry(self) -> None:
        """Ends the pause."""
        self._hurry.set()

    def may_succeed(self, now_s: float) -> bool:
        """Whether an attempt is under way that has not been silent for too long, and so is worth waiting for."""
        patience_s = SILENT_AT_MOST_S if self.model is None else ANSWERED_AT_MOST_S
        return not self.is_paused and now_s - self._since_s < patience_s

    async def outcome(self, answered_at_most_s: float) -> bool:
        """Waits for the end of the present attempt, and returns whether it succeeded. It fails if it is silent for
        SILENT_AT_MOST_S, or has answered and then makes no progress for `answered_at_most_s`."""
        while not self.works and not self.is_paused:
            patience_s = SILENT_AT_MOST_S if self.model is None else answered_at_most_s
            left_s = self._since_s + patience_s - self._clock_s()
            if left_s <= 0:
                return False
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._changed.wait()
        return self.works

    async def next(self) -> None:
        """Returns when what the attempt found is lost and the pause after that is over."""
        while self.works or self.is_paused:
            self._changed.clear()
            await self._changed.wait()


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
