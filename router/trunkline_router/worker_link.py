"""Everything a router has with one worker: channel, model, cache events, session, load. Reconnects by itself."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

import grpc

from trunkline.grant import key_id
from trunkline.proof import Metadata, proof_metadata
from trunkline.protocol import MIN_ROUTER_PROTOCOL_WITH_KEY, PROTOCOL_VERSION
from trunkline.v1.worker_pb2 import (
    GetModelRequest,
    GetModelResponse,
    GetStatsRequest,
    SessionWelcome,
    StepCostModel,
    WatchCacheRequest,
)
from trunkline.v1.worker_pb2_grpc import WorkerServiceStub
from trunkline_router.breaker import Breaker
from trunkline_router.cache_follower import CacheFollower, WatchBroken
from trunkline_router.index import WorkerBlocks
from trunkline_router.live import Live
from trunkline_router.prefix_index import PrefixIndex
from trunkline_router.session import WorkerSession
from trunkline_router.signs_of_life import SignsOfLife
from trunkline_router.tokenizer import TokenizerError
from trunkline_router.tokenizer_pool import Tokenizers
from trunkline_router.tries import Tries
from trunkline_router.worker_names import SameWorker, WorkerNames
from trunkline_runtime.channel import open_channel
from trunkline_runtime.log import get_logger

if TYPE_CHECKING:
    from trunkline.v1.worker_pb2_grpc import WorkerServiceAsyncStub  # exists in the stub file only

UNARY_TIMEOUT_S = 10.0  # GetModel, from a worker that says it is up
LONG_STEPS = 3.0  # steps of the largest size that a worker may be silent for beyond the time-out
LEAST_SHARE = 0.1  # of a worker that has this moment come
BACKOFF_FIRST_S, BACKOFF_MOST_S = 0.2, 2.0


class WorkerUnusable(Exception):
    """What the worker says of itself makes no sense: perhaps it is of another version. One line for a person."""


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """inter_token_timeout_s: a worker that has work of this router and says nothing for so long is taken for hung.
    slow_start_s: time in which a worker that has just come, or come back, gets up to its full share of requests."""

    inter_token_timeout_s: float = 10.0
    slow_start_s: float = 10.0


class WorkerLink:
    """Keeps one worker connected. `live` is there while requests can be sent to it."""

    def __init__(
        self,
        address: str,
        router_id: str,
        tokenizers: Tokenizers,
        index: PrefixIndex,
        on_change: Callable[[], None],
        rng: Random,
        *,
        limits: LinkLimits | None = None,
        grant_key: bytes = b"",
        clock_s: Callable[[], float] = time.monotonic,
        names: WorkerNames | None = None,
    ) -> None:
        self.address = address
        self.live: Live | None = None
        self.wanted = True  # once it is not, the present connection is the last one
        self.is_named = True  # by this router's own sources; else only another router's lease speaks for it
        self.same_as: WorkerLink | None = None  # the link that has this worker already, by another name
        self.model: GetModelResponse | None = None  # of the last connection
        self.problem = "not connected yet"  # in one line; empty while it is connected
        self.breaker = Breaker(on_change)
        self.tries = Tries()  # to connect
        self._sweeping: asyncio.Task[None] | None = None
        self._names = names or WorkerNames()
        self._limits = limits or LinkLimits()
        self._grant_key = grant_key
        self._clock_s = clock_s
        self._connected_s = 0.0
        self._was_live = False  # in the present connection
        self._router_id = router_id
        self._tokenizers = tokenizers
        self._index = index
        self._on_change = on_change
        self._rng = rng
        self._log = get_logger()

    async def run(self) -> None:
        """Connects, and again whenever the connection ends, as long as it is wanted."""
        backoff_s = BACKOFF_FIRST_S
        last_problem = ""
        while self.wanted:
            problem = "closed by the worker"
            was_live = False
            holder = None
            try:
                async with open_channel(self.address) as channel:
                    await self._serve(channel)
            except grpc.aio.AioRpcError as error:
                problem = f"{error.code().name}: {error.details()}"
            except SameWorker as same:
                holder, problem = same.holder, str(same)
            except (WorkerUnusable, WatchBroken, TokenizerError, TimeoutError) as error:
                problem = str(error) or type(error).__name__
            except Exception as error:  # one worker's nonsense must not end the router for all the others
                problem = f"unexpected {type(error).__name__}"
                self._log.error("unexpected error", address=self.address, exc_info=error)
            finally:
                was_live, self._was_live = self._was_live, False
                if was_live:
                    now_s = self._clock_s()
                    self.breaker.on_lost(now_s, now_s - self._connected_s)
                    self._on_change()
            if was_live or problem != last_problem:  # one line per change, not per try
                self._log.warning("worker not connected", address=self.address, problem=problem)
            last_problem = self.problem = problem
            self.same_as = holder
            backoff_s = BACKOFF_FIRST_S if was_live else min(backoff_s * 2, BACKOFF_MOST_S)
            await self.tries.pause(backoff_s * self._rng.uniform(0.5, 1.0))
        if self._sweeping is not None:
            await self._sweeping

    async def _serve(self, channel: grpc.aio.Channel) -> None:
        """One connection: returns or raises when it is over."""
        stub: WorkerServiceAsyncStub = WorkerServiceStub(channel)
        model = await stub.GetModel(GetModelRequest(), timeout=UNARY_TIMEOUT_S)
        check_model(model, self._grant_key)
        with self._names.held(model, self):
            self.same_as = None
            self.tries.answered(model.model)
            await self._converse(stub, model)

    async def _converse(self, stub: "WorkerServiceAsyncStub", model: GetModelResponse) -> None:
        tokenizer = await self._tokenizers.of(model, stub)
        live = Live(model, WorkerBlocks(self._index), tokenizer, WorkerSession(), self.breaker, self.address)
        opened, synced = asyncio.Event(), asyncio.Event()

        def on_open(welcome: SessionWelcome) -> None:
            if welcome.epoch != model.epoch:
                raise WatchBroken("the worker was restarted while connecting")
            opened.set()

        proof = self._proof("Session", model)
        session = asyncio.create_task(live.session.run(stub, self._router_id, on_open, proof))
        watch = asyncio.create_task(self._watch(stub, live, synced))
        ready = asyncio.create_task(self._announce(live, opened, synced))
        looking = asyncio.create_task(self._look_after(live, stub))
        try:
            done, _ = await asyncio.wait({session, watch, looking}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if not task.cancelled():  # a stream that broke while it was written to
                    task.result()
        finally:
            self.live = None  # before anything else runs: nobody may choose a worker that is gone
            self._on_change()
            self.tries.lost()
            for task in (session, watch, ready, looking):
                task.cancel()
            await asyncio.gather(session, watch, ready, looking, return_exceptions=True)
            live.blocks.close()
            if self._sweeping is None or self._sweeping.done():
                self._sweeping = asyncio.create_task(self._sweep())

    async def _sweep(self) -> None:
        """Rids the index of what is lost, while requests and another connection go on."""
        for _ in iter(self._index.sweep, False):
            await asyncio.sleep(0)

    async def _announce(self, live: Live, *conditions: asyncio.Event) -> None:
        for condition in conditions:
            await condition.wait()
        self.live, self.model, self.problem = live, live.model, ""
        self._was_live = True
        self._connected_s = self._clock_s()
        self._log.info("worker connected", address=self.address, worker=live.model.worker_id, model=live.model.model,
                       blocks=len(live.blocks))  # fmt: skip
        self._on_change()

    async def _look_after(self, live: Live, stub: "WorkerServiceAsyncStub") -> None:
        """Notices a worker that hangs, and that it is back; lets it start slowly."""
        signs = SignsOfLife(self._limits.inter_token_timeout_s)
        granted_signs = SignsOfLife(self._limits.inter_token_timeout_s)
        news_when_hung = 0
        started_s = self._clock_s()
        while True:
            live.slow_start_share = slow_start_share(self._clock_s() - started_s, self._limits.slow_start_s)
            await asyncio.sleep(signs.check_interval_s)
            now_s = self._clock_s()
            news = live.num_heard
            if live.is_hung and news != news_when_hung:
                live.is_hung = False
                live.comebacks += 1
                started_s = now_s
                self._log.info("worker is back", address=self.address)
                self._on_change()
                continue
            allowance_s = longest_silence_s(live.model, live.load.step_cost)
            has_work = live.session.num_open > 0
            is_silent = signs.is_silent(now_s, news=news, has_work=has_work, allowance_s=allowance_s)
            # What was granted may never have come to the worker: before it is taken for hung it is asked.
            if granted_signs.is_silent(now_s, news=news, has_work=live.granted_choices > 0):
                granted_signs = SignsOfLife(self._limits.inter_token_timeout_s)
                is_silent |= not (live.is_hung or await self._answers(stub, live.model) or live.num_heard != news)
            if is_silent and not live.is_hung:
                live.is_hung = True
                news_when_hung = news
                why = f"the worker has said nothing for {signs.timeout_s:g} s"
                self._log.error("worker hangs", address=self.address, choices=live.session.num_open)
                self._on_change()
                live.session.give_up(why)

    def _proof(self, method: str, model: GetModelResponse) -> Metadata:
        """That this router may call it."""
        now_unix_ms = int(time.time() * 1e3)
        return proof_metadata(
            self._grant_key, method, worker_id=model.worker_id, epoch=model.epoch, now_unix_ms=now_unix_ms
        )

    async def _answers(self, stub: "WorkerServiceAsyncStub", model: GetModelResponse) -> bool:
        """Whether the worker's engine answers; it does between two steps."""
        timeout_s, proof = self._limits.inter_token_timeout_s, self._proof("GetStats", model)
        try:
            await stub.GetStats(GetStatsRequest(), timeout=timeout_s, metadata=proof)
        except grpc.aio.AioRpcError as error:
            return error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED  # other trouble is the session's to notice
        return True

    async def _watch(self, stub: "WorkerServiceAsyncStub", live: Live, synced: asyncio.Event) -> None:
        """Follows the worker's cache. A gap or a broken stream starts a new subscription, while requests go on and
        what is known stays in use until the new snapshot comes. A new epoch ends the connection.
        """
        while True:
            problem = "cache events ended"
            follower = CacheFollower(live.blocks, live.model.epoch)
            call = stub.WatchCache(WatchCacheRequest(stride=1), metadata=self._proof("WatchCache", live.model))
            try:
                async for item in call:
                    now_s = self._clock_s()
                    live.num_watched += 1
                    if item.WhichOneof("item") == "load":
                        accepts = live.accepts
                        live.take_load(item.load, now_s)
                        if live.accepts != accepts:
                            self._on_change()
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
            await asyncio.sleep(BACKOFF_FIRST_S * self._rng.uniform(0.5, 1.0))
            self._log.warning("subscribing anew", address=self.address, problem=problem)


def longest_silence_s(model: GetModelResponse, cost: StepCostModel) -> float:
    """How long a worker that is well may say nothing: in its largest steps, and while a batch fills."""
    return LONG_STEPS * (cost.fixed_s + cost.token_s * model.max_step_tokens) + model.batch_window_ms / 1e3


def slow_start_share(connected_for_s: float, slow_start_s: float) -> float:
    """How much of its full share a worker takes; from LEAST_SHARE to 1."""
    if connected_for_s >= slow_start_s:
        return 1.0
    return LEAST_SHARE + (1 - LEAST_SHARE) * connected_for_s / slow_start_s


def check_model(model: GetModelResponse, grant_key: bytes = b"") -> None:
    """Raises WorkerUnusable where requests could not be routed by it."""
    if model.min_router_protocol > PROTOCOL_VERSION:
        raise WorkerUnusable(
            f"the worker asks for routers that speak protocol {model.min_router_protocol}, and this one speaks "
            f"{PROTOCOL_VERSION}: upgrade routers before workers"
        )
    asks_for_proofs = model.min_router_protocol >= MIN_ROUTER_PROTOCOL_WITH_KEY
    if asks_for_proofs and model.grant_key_id and model.grant_key_id != key_id(grant_key):
        lacks = "has another one" if grant_key else "has none"
        raise WorkerUnusable(f"the worker has a grant key, and this router {lacks}: start both with one --grant-key")
    if not model.model:
        raise WorkerUnusable("the worker does not say which model it serves")
    for name in ("block_size", "vocab_size", "context_length", "kv_token_capacity"):
        if getattr(model, name) < 1:
            raise WorkerUnusable(f"the worker's {name} is {getattr(model, name)}; allowed: 1 or more")
