"""The engine loop: schedule → forward → sample → commit."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby

from trunkline.engine.v1.engine_pb2 import EngineOutput, EngineRequest, EngineStep
from trunkline.status import (
    CODE_INVALID_ARGUMENT,
    CODE_RESOURCE_EXHAUSTED,
    CONTEXT_LENGTH_EXCEEDED,
    OVERLOADED,
    RequestRefused,
)
from trunkline.v1.generation_pb2 import FinishReason, PromptReport, TokenLogprob, TokenLogprobs
from trunkline.v1.worker_pb2 import (
    BlocksRemoved,
    BlocksStored,
    CacheEvent,
    CacheTier,
    LoadSample,
    Submit,
)
from trunkline_worker.executor import Executor
from trunkline_worker.plan import PositionLogprobs
from trunkline_worker.prefix_tree import CacheChange, Removed, Stored
from trunkline_worker.scheduler import Scheduler, SequenceNews
from trunkline_worker.sequence import Finish
from trunkline_worker.submission import sequence_of

# What a refused caller is told to wait; about the time in which a busy worker finishes a short request.
OVERLOAD_RETRY_DELAY_MS = 1000

_FINISH = {
    Finish.STOP: FinishReason.FINISH_REASON_STOP,
    Finish.LENGTH: FinishReason.FINISH_REASON_LENGTH,
    Finish.ABORT: FinishReason.FINISH_REASON_ABORT,
}


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the engine must know of its model."""

    max_total_tokens: int  # of prompt and output together: the context, or the KV pool where that is smaller
    eos_token_ids: frozenset[int]


class Engine:
    """Scheduler and executor, driven one step at a time by whoever owns the thread (see engine_process.py)."""

    def __init__(
        self, scheduler: Scheduler, executor: Executor, limits: ModelLimits, clock_s: Callable[[], float]
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.limits = limits
        self._clock_s = clock_s
        self._arrivals = 0
        self._refusals: list[EngineOutput] = []
        self._step_time_us = 0
        self._load_changed = False  # by an abort, which may be all that happens for a while

    @property
    def has_work(self) -> bool:
        return bool(self._refusals) or self._load_changed or self.scheduler.has_work

    def accept(self, request: EngineRequest) -> None:
        """Takes in new and dropped work."""
        for submit in request.submits:
            try:
                self._submit(submit)
            except RequestRefused as refused:
                self._refusals.append(EngineOutput(handle=submit.handle, error=refused.to_proto()))
        for handle in request.abort_handles:
            self._load_changed |= self.scheduler.abort(handle)

    def step(self) -> EngineStep | None:
        """Computes one step. None when there was nothing to do."""
        outputs, self._refusals = self._refusals, []
        started_s = self._clock_s()
        plan = self.scheduler.schedule()
        if plan is not None:
            self.executor.forward(plan)
            result = self.executor.sample(plan)
            outputs += [_output(news) for news in self.scheduler.commit(plan, result)]
            self._step_time_us = int((self._clock_s() - started_s) * 1e6)
        if plan is None and not outputs and not self._load_changed:
            return None
        self._load_changed = False
        changes = self.scheduler.blocks.tree.take_changes()
        return EngineStep(outputs=outputs, cache_events=cache_events(changes), load=self.load())

    def load(self) -> LoadSample:
        """How busy the engine is."""
        scheduler, blocks = self.scheduler, self.scheduler.blocks
        return LoadSample(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            waiting_uncached_tokens=scheduler.waiting_tokens,
            kv_live_blocks=blocks.num_live,
            kv_cached_blocks=blocks.num_cached,
            kv_free_blocks=blocks.num_available - blocks.num_cached,
            step_time_us=self._step_time_us,
        )

    def _submit(self, submit: Submit) -> None:
        if not self.scheduler.can_submit():
            limit = self.scheduler.limits.max_waiting_requests
            raise RequestRefused(
                CODE_RESOURCE_EXHAUSTED,
                OVERLOADED,
                f"the queue is full: {limit} choices wait already",
                retry_delay_ms=OVERLOAD_RETRY_DELAY_MS,
            )
        # The front has validated the request; these two are what the scheduler's own promises rest on.
        num_tokens = len(submit.prompt_token_ids) + len(submit.resume.output_token_ids)
        if not submit.prompt_token_ids or num_tokens >= self.limits.max_total_tokens:
            raise RequestRefused(
                CODE_INVALID_ARGUMENT,
                CONTEXT_LENGTH_EXCEEDED,
                f"{num_tokens} tokens leave no room in the {self.limits.max_total_tokens} that this worker can hold",
                field="prompt",
            )
        self._arrivals += 1
        self.scheduler.submit(
            sequence_of(
                submit,
                tree=self.scheduler.blocks.tree,
                arrival=self._arrivals,
                max_total=self.limits.max_total_tokens,
                eos=self.limits.eos_token_ids,
            )
        )


def cache_events(changes: Iterable[CacheChange]) -> list[CacheEvent]:
    """Changes as events, with the blocks of one chain and runs of removals packed together. Order is kept."""
    events: list[CacheEvent] = []
    for kind, run in groupby(changes, key=type):
        if kind is Removed:
            removed = BlocksRemoved(block_hashes=b"".join(change.digest for change in run))
            events.append(CacheEvent(removed=removed, tier=CacheTier.CACHE_TIER_DEVICE))
            continue
        chain: list[Stored] = []
        for change in run:
            assert isinstance(change, Stored)
            if chain and change.parent_digest != chain[-1].digest:
                events.append(_stored(chain))
                chain = []
            chain.append(change)
        events.append(_stored(chain))
    return events


def _stored(chain: list[Stored]) -> CacheEvent:
    stored = BlocksStored(
        block_hashes=b"".join(change.digest for change in chain),
        parent_hash=chain[0].parent_digest,
        depth=chain[0].depth,
    )
    return CacheEvent(stored=stored, tier=CacheTier.CACHE_TIER_DEVICE)


def _output(news: SequenceNews) -> EngineOutput:
    output = EngineOutput(handle=news.sequence_id, token_ids=news.token_ids, stop_token_id=news.stop_token_id)
    if news.logprobs:
        output.logprobs.extend(_logprobs(entry) for entry in news.logprobs)
    if news.finish is not None:
        output.finish_reason = _FINISH[news.finish]
    if news.prompt is not None:
        output.prompt.CopyFrom(
            PromptReport(prompt_tokens=news.prompt.num_tokens, cached_tokens=news.prompt.cached_tokens)
        )
        if news.prompt.logprobs is not None:
            # Nothing predicts the first prompt token: its entry is empty.
            output.prompt.logprobs.extend([TokenLogprobs(), *map(_logprobs, news.prompt.logprobs)])
    if news.error is not None:
        output.error.CopyFrom(news.error.to_proto())
    return output


def _logprobs(entry: PositionLogprobs) -> TokenLogprobs:
    return TokenLogprobs(
        chosen=TokenLogprob(token_id=entry.token_id, logprob=entry.logprob, rank=entry.rank),
        top=[TokenLogprob(token_id=t, logprob=p, rank=rank) for rank, (t, p) in enumerate(entry.top, start=1)],
    )
