"""A worker to which the router is connected."""

from math import inf

from trunkline.v1.worker_pb2 import GetModelResponse
from trunkline_router.prompts.tokenizer import PromptTokenizer
from trunkline_router.routing.worker_blocks import WorkerBlocks
from trunkline_router.routing.worker_state import WorkerState
from trunkline_router.workers.claims.pool_terms import Terms
from trunkline_router.workers.sessions.session import WorkerSession
from trunkline_router.workers.worker_breaker import WorkerBreaker
from trunkline_runtime.log import get_logger


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
        super().__init__(model, blocks)
        self.address = address
        self.tokenizer = tokenizer
        self.session = session
        self.breaker = breaker  # the worker's, across connections
        self.terms = Terms(model.vocab_size, tokenizer.encoding)
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
