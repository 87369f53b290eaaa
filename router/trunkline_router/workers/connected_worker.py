"""A worker to which the router is connected: its state, the calls to it, and its counts over all connections."""

from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING

from google.protobuf.duration_pb2 import Duration

from trunkline.capabilities import Capabilities
from trunkline.v1.worker_pb2 import (
    DrainRequest,
    DrainResponse,
    GetModelResponse,
    GetStatsRequest,
    GetStatsResponse,
    UndrainRequest,
)
from trunkline_router.prompts.tokenizer import PromptTokenizer
from trunkline_router.routing.prefix_index import WorkerBlocks
from trunkline_router.routing.worker_state import WorkerState
from trunkline_router.workers.breaker import WorkerBreaker
from trunkline_router.workers.link_context import LinkContext
from trunkline_router.workers.pool_terms import Terms
from trunkline_router.workers.session import WorkerSession
from trunkline_runtime.log import get_logger

if TYPE_CHECKING:
    from trunkline.v1.worker_pb2_grpc import WorkerServiceAsyncStub  # exists in the stub file only


class ConnectedWorker(WorkerState):
    """What the router knows of a connected worker, and how it sends to it. Each connection has a new one."""

    def __init__(
        self,
        model: GetModelResponse,
        blocks: WorkerBlocks,
        tokenizer: PromptTokenizer,
        session: WorkerSession,
        breaker: WorkerBreaker,
        address: str,
    ) -> None:
        super().__init__(model, blocks, session.steps)
        self.address = address
        self.tokenizer = tokenizer
        self.session = session
        self.breaker = breaker  # the worker's, across connections
        self.capabilities = Capabilities.of(model)
        pooling = model.pooling.SerializeToString(deterministic=True)
        self.terms = Terms(model.vocab_size, tokenizer.encoding, self.capabilities.task, pooling)
        self.aside = ""  # why it gets no requests although it is healthy, in one line: it differs from its pool
        self.is_hung = False
        self.hangs = 0  # how often it hung
        self.comebacks = 0  # how often it recovered after it had hung
        self.num_watched = 0  # messages of its watch stream
        self.watched_s = 0.0  # time that its link has watched it, without time in which the router stood still
        self.may_be_silent_s = inf  # silence over work before a request leaves it: longer than its longest step

    @property
    def num_messages(self) -> int:
        """Messages received from it. While it has work, only its steps send any."""
        return self.session.num_step_outputs + self.num_watched

    @property
    def accepts(self) -> bool:
        return not (self.load.draining or self.is_hung)

    def on_turn(self) -> None:
        log = get_logger()
        if self.routed_by_load:
            log.warning("worker routed by load: its events are stale, or its index was wrong too often",
                        worker=self.worker_id, index_accuracy=round(self.accuracy.share, 3))  # fmt: skip
        else:
            log.info("worker's cache events count again", worker=self.worker_id)


@dataclass(slots=True)
class WorkerTotals:
    """Counts that only grow."""

    connections: int = 0
    losses: int = 0
    hangs: int = 0
    promised_tokens: int = 0  # prompt tokens that the index promised
    found_tokens: int = 0  # those of them that were in the worker's cache

    def add(self, worker: ConnectedWorker) -> None:
        """Adds the counts of one connection, which has ended."""
        self.hangs += worker.hangs
        self.promised_tokens += worker.accuracy.promised_so_far
        self.found_tokens += worker.accuracy.found_so_far

    def with_present(self, worker: ConnectedWorker | None) -> "WorkerTotals":
        """The totals, with those of the present connection if there is one."""
        made = replace(self)
        if worker is not None:
            made.add(worker)
        return made


class WorkerCalls:
    """Each call proves to the worker that a router makes it. They raise grpc.aio.AioRpcError."""

    def __init__(self, stub: "WorkerServiceAsyncStub", context: LinkContext, model: GetModelResponse) -> None:
        self._stub = stub
        self._context = context
        self._model = model

    async def stats(self, timeout_s: float) -> GetStatsResponse:
        """Returns the engine's statistics. It answers between two steps."""
        proof = self._context.proof("GetStats", self._model)
        return await self._stub.GetStats(GetStatsRequest(), timeout=timeout_s, metadata=proof)

    async def drain(self, timeout_s: float | None) -> DrainResponse:
        """Drains the worker; returns when none of its requests is left. If this is cancelled, the drain goes on.

        timeout_s: for running requests to finish; None: the worker's own setting
        """
        request = DrainRequest()
        if timeout_s is not None:
            request.timeout.CopyFrom(Duration(seconds=int(timeout_s), nanos=int(timeout_s % 1 * 1e9)))
        return await self._stub.Drain(request, metadata=self._context.proof("Drain", self._model))

    async def undrain(self, timeout_s: float) -> None:
        """Ends the worker's drain."""
        proof = self._context.proof("Undrain", self._model)
        await self._stub.Undrain(UndrainRequest(), timeout=timeout_s, metadata=proof)
