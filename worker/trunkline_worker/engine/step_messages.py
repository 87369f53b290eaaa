"""The outputs of a step, as messages to the front."""

from collections.abc import Iterable
from itertools import groupby

from trunkline.engine.v1.engine_pb2 import EngineOutput, StepRecord
from trunkline.status import CODE_INTERNAL, INTERNAL, RequestRefused
from trunkline.v1.generation_pb2 import FinishReason, PromptReport, TokenLogprob, TokenLogprobs
from trunkline.v1.worker_pb2 import BlocksRemoved, BlocksStored, CacheEvent, CacheTier
from trunkline_worker.cache.prefix_tree import CacheChange, Removed, Stored
from trunkline_worker.cache.sequence import Finish
from trunkline_worker.engine.step_floor import FloorOfStep
from trunkline_worker.scheduler.sequence_table import StepOutput, StepOutputs
from trunkline_worker.scheduler.stats import StepCounts
from trunkline_worker.step.logprob_bytes import prompt_logprobs_bytes
from trunkline_worker.step.plan import PositionLogprobs, RowError

_FINISH = {
    Finish.STOP: FinishReason.FINISH_REASON_STOP,
    Finish.LENGTH: FinishReason.FINISH_REASON_LENGTH,
    Finish.ABORT: FinishReason.FINISH_REASON_ABORT,
}


def cache_events(changes: Iterable[CacheChange]) -> list[CacheEvent]:
    """Changes as events, in order; blocks of one chain, and consecutive removals, are packed into one event."""
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
    """The last output of a sequence that was ended by an unexpected exception."""
    found = RowError.of_bug(error)
    refused = RequestRefused(CODE_INTERNAL, INTERNAL, found.reason)
    return EngineOutput(handle=handle, error=refused.to_proto(), trace=found.trace)


def fill_record(
    record: StepRecord, outputs: StepOutputs, counts: StepCounts, done_s: float, floor: FloorOfStep | None = None
) -> None:
    """Says what a step computed, for timelines and metrics. Filling the record where it is takes a third of the time of
    making one and copying it, and most steps have neither prompts nor padding."""
    record.done_s = done_s
    record.device_s = counts.device_time_s
    record.host_s = counts.host_time_s
    record.decode_tokens = counts.decode_tokens
    record.sequences = counts.sequences
    record.regular_tokens = outputs.num_regular
    if counts.prefill_tokens:
        record.prefill_tokens = counts.prefill_tokens
    if counts.padding_tokens:
        record.padding_tokens = counts.padding_tokens
    if floor is not None:
        record.least_bytes, record.least_flops = floor.work
        if floor.least_s is not None:
            record.least_s = floor.least_s
    for chunk in outputs.chunks:
        record.chunk_handles.append(chunk.sequence_id)
        record.chunk_tokens.append(chunk.num_tokens)
        record.chunk_recomputed.append(chunk.num_recomputed)
    for late in outputs.late:
        record.late_handles.append(late.sequence_id)
        record.late_since_s.append(late.since_s)
        record.late_skipped_s.append(late.skipped_s)


def sequence_output(step_output: StepOutput) -> EngineOutput:
    """The output of a step for one sequence."""
    output = EngineOutput(
        handle=step_output.sequence_id, token_ids=step_output.token_ids, stop_token_id=step_output.stop_token_id
    )
    if step_output.logprobs:
        output.logprobs.extend(_logprobs(entry) for entry in step_output.logprobs)
    if step_output.finish is not None:
        output.finish_reason = _FINISH[step_output.finish]
    if step_output.prompt is not None:
        output.prompt.CopyFrom(
            PromptReport(prompt_tokens=step_output.prompt.num_tokens, cached_tokens=step_output.prompt.cached_tokens)
        )
        if step_output.prompt.logprobs is not None:
            # No token precedes the first prompt token, so its entry is empty.
            output.prompt.logprobs.add()
            output.prompt.MergeFromString(prompt_logprobs_bytes(step_output.prompt.logprobs))
    if step_output.error is not None:
        output.error.CopyFrom(step_output.error.to_proto())
        output.trace = step_output.trace
    return output


def _logprobs(entry: PositionLogprobs) -> TokenLogprobs:
    return TokenLogprobs(
        chosen=TokenLogprob(token_id=entry.token_id, logprob=entry.logprob, rank=entry.rank),
        top=[TokenLogprob(token_id=t, logprob=p, rank=rank) for rank, (t, p) in enumerate(entry.top, start=1)],
    )
