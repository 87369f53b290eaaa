"""What a step brought, as messages to the front."""

from collections.abc import Iterable
from itertools import groupby

from trunkline.engine.v1.engine_pb2 import EngineOutput
from trunkline.status import CODE_INTERNAL, INTERNAL, RequestRefused
from trunkline.v1.generation_pb2 import FinishReason, PromptReport, TokenLogprob, TokenLogprobs
from trunkline.v1.worker_pb2 import BlocksRemoved, BlocksStored, CacheEvent, CacheTier
from trunkline_worker.cache.prefix_tree import CacheChange, Removed, Stored
from trunkline_worker.cache.sequence import Finish
from trunkline_worker.scheduling.step_outputs import StepOutput
from trunkline_worker.step.logprob_bytes import prompt_logprobs_bytes
from trunkline_worker.step.plan import PositionLogprobs, RowError

_FINISH = {
    Finish.STOP: FinishReason.FINISH_REASON_STOP,
    Finish.LENGTH: FinishReason.FINISH_REASON_LENGTH,
    Finish.ABORT: FinishReason.FINISH_REASON_ABORT,
}


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


def broken_off(handle: int, error: Exception) -> EngineOutput:
    """News of a sequence that a bug has ended."""
    found = RowError.of_bug(error)
    refused = RequestRefused(CODE_INTERNAL, INTERNAL, found.reason)
    return EngineOutput(handle=handle, error=refused.to_proto(), trace=found.trace)


def sequence_output(news: StepOutput) -> EngineOutput:
    """What a step brought for one sequence."""
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
            output.prompt.logprobs.add()
            output.prompt.MergeFromString(prompt_logprobs_bytes(news.prompt.logprobs))
    if news.error is not None:
        output.error.CopyFrom(news.error.to_proto())
        output.trace = news.trace
    return output


def _logprobs(entry: PositionLogprobs) -> TokenLogprobs:
    return TokenLogprobs(
        chosen=TokenLogprob(token_id=entry.token_id, logprob=entry.logprob, rank=entry.rank),
        top=[TokenLogprob(token_id=t, logprob=p, rank=rank) for rank, (t, p) in enumerate(entry.top, start=1)],
    )
