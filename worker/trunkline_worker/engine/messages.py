"""Between messages and the scheduler: a submit becomes a sequence; outputs and statistics become messages."""

from collections.abc import Iterable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from trunkline.engine.v1.engine_pb2 import EngineOutput, StepRecord
from trunkline.sampling_params import NUMBERS
from trunkline.status import CODE_INTERNAL, INTERNAL, RequestRefused
from trunkline.v1.generation_pb2 import FinishReason, PromptReport, SamplingParams, TokenLogprob, TokenLogprobs
from trunkline.v1.worker_pb2 import (
    BlocksRemoved,
    BlocksStored,
    CacheEvent,
    CacheTier,
    Distribution,
    GetStatsResponse,
    LaneStats,
    LoadSample,
    StepSample,
    StepTotals,
    Submit,
    TenantStats,
)
from trunkline_worker.cache.prefix_tree import CacheChange, PrefixTree, Removed, Stored
from trunkline_worker.cache.sequence import Finish, Sequence
from trunkline_worker.engine.step_floor import FloorOfStep
from trunkline_worker.scheduler.scheduler import Scheduler
from trunkline_worker.scheduler.sequence_table import StepOutput, StepOutputs
from trunkline_worker.scheduler.stats import EngineStats, Histogram, StepCounts
from trunkline_worker.step.fair_share import Account
from trunkline_worker.step.lanes import Lane, lane_number
from trunkline_worker.step.logprob_bytes import prompt_logprobs_bytes
from trunkline_worker.step.plan import PositionLogprobs, RowError, Sampling
from trunkline_worker.step.sampling_key import choice_seed

# Sampling at a lower temperature is greedy but for exact ties. As a float field carries it, in 32 bits.
LEAST_TEMPERATURE = float(np.float32(1e-5))
_FINISH = {
    Finish.STOP: FinishReason.FINISH_REASON_STOP,
    Finish.LENGTH: FinishReason.FINISH_REASON_LENGTH,
    Finish.ABORT: FinishReason.FINISH_REASON_ABORT,
}
MAX_TENANTS = 100
SECONDS_PER_HOUR = 3600
MILLION = 1_000_000


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's tokens, and the tokens and digests of its full blocks if they are known already (simulation)."""

    token_ids: Tokens[int]
    packed: Tokens[bytes] = ()  # see Sequence.packed
    digests: Tokens[bytes] = ()


def sequence_of(
    submit: Submit,
    prompt: Prompt,
    *,
    tree: PrefixTree,
    account: Account,
    arrival: int,
    now_s: float,
    max_total: int,
    eos: frozenset[int],
    pools_every_state: bool = False,
) -> Sequence:
    """The sequence that a Submit describes, with a prompt that is passed beside it.

    max_total: bounds prompt and output together: the context length or the KV pool, whichever is smaller
    pools_every_state: a vector or a score is made of the states of all tokens
    """
    deadline_s = now_s + submit.timeout.ToNanoseconds() / 1e9 if submit.HasField("timeout") else None
    sampling = resolve_sampling(submit.sampling, submit.choice, max_total - len(prompt.token_ids), eos)
    if submit.work.HasField("grammar"):  # its end always ends the choice; its masks see to min_tokens
        sampling = replace(sampling, min_tokens=0, end_token_ids=sampling.end_token_ids | eos)
    if not sampling.max_tokens:
        sampling = replace(
            sampling, first_segment_tokens=submit.first_segment_tokens, needs_every_state=pools_every_state
        )
    return Sequence(
        sequence_id=submit.handle,
        token_ids=[*prompt.token_ids, *submit.resume.output_token_ids],
        prompt_len=len(prompt.token_ids),
        sampling=sampling,
        root=tree.root(submit.cache_salt),
        arrival=arrival,
        account=account,
        arrival_s=now_s,
        deadline_s=deadline_s,
        packed=[*prompt.packed],
        digests=[*prompt.digests],
    )


def resolve_sampling(params: SamplingParams, choice: int, room: int, eos: frozenset[int]) -> Sampling:
    """Resolved parameters. Absent fields take their neutral value; routers have filled in the model's defaults."""

    given: dict[str, Any] = {name: getattr(params, name) for name in NUMBERS if params.HasField(name)}  # type: ignore[arg-type]
    if given.get("temperature", 1.0) < LEAST_TEMPERATURE:
        given["temperature"] = 0.0
    stop = frozenset(params.stop_token_ids)
    return Sampling(
        max_tokens=min(params.max_tokens, room) if params.HasField("max_tokens") else room,
        seed=choice_seed(params.seed, choice),
        logit_bias=tuple(sorted(params.logit_bias.items())),
        min_tokens=params.min_tokens,
        end_token_ids=stop if params.ignore_eos else stop | eos,
        logprobs=params.logprobs if params.HasField("logprobs") else None,
        prompt_logprobs=params.prompt_logprobs if params.HasField("prompt_logprobs") else None,
        **given,
    )


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
    if counts.expert_imbalance:
        record.expert_imbalance.extend(counts.expert_imbalance)
    if outputs.num_forced:
        record.forced_tokens = outputs.num_forced
    if outputs.num_late_masks:
        record.late_masks = outputs.num_late_masks
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
    if step_output.whole is not None:
        output.values.extend(step_output.whole)
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


def stats_report(
    stats: EngineStats, scheduler: Scheduler, load: LoadSample, *, price_per_hour: float, now_s: float
) -> GetStatsResponse:
    """The response to GetStats, with at most MAX_TENANTS tenants: active ones first, then by service given."""
    rate = stats.output_tokens_per_s(now_s)
    last, total = stats.last, stats.total
    response = GetStatsResponse(
        uptime_s=now_s - stats.started_s,
        load=load,
        steps=StepTotals(
            steps=stats.steps,
            prefill_tokens=total.prefill_tokens,
            decode_tokens=total.decode_tokens,
            padding_tokens=total.padding_tokens,
            prefix_hit_tokens=stats.prefix_hit_tokens,
            admissions=stats.admissions,
            preemptions=stats.preemptions,
            preempted_tokens=stats.preempted_tokens,
            stale_results=stats.stale_results,
            host_time_s=total.host_time_s,
            device_time_s=total.device_time_s,
        ),
        last_step=StepSample(
            prefill_tokens=last.prefill_tokens,
            decode_tokens=last.decode_tokens,
            padding_tokens=last.padding_tokens,
            sequences=last.sequences,
            host_time_us=int(last.host_time_s * 1e6),
            device_time_us=int(last.device_time_s * 1e6),
        ),
        host_time_s=_distribution(stats.host_time),
        device_time_s=_distribution(stats.device_time),
        output_tokens_per_s=rate,
        cost_per_million_output_tokens=price_per_hour / SECONDS_PER_HOUR / rate * MILLION if rate else 0.0,
        expert_imbalance=stats.expert_imbalance,
    )
    for lane in Lane:
        counts = stats.lanes[lane]
        response.lanes.append(
            LaneStats(
                lane=lane_number(lane),  # type: ignore[arg-type]
                running=sum(sequence.lane is lane for sequence in scheduler.running),
                waiting=sum(sequence.lane is lane for sequence in scheduler.waiting),
                accepted=counts.accepted,
                refused=counts.refused,
                finished=counts.finished,
                aborted=counts.aborted,
                expired=counts.expired,
                output_tokens=counts.output_tokens,
                queue_time_s=_distribution(counts.queue_time),
                ttft_s=_distribution(counts.ttft),
                itl_s=_distribution(counts.itl),
                tpot_s=_distribution(counts.tpot),
                e2e_s=_distribution(counts.e2e),
            )
        )
    accounts = [account for lane in scheduler.waiting.lanes for account in lane]
    accounts.sort(key=lambda account: (account.is_idle, -account.given))
    response.tenants.extend(
        TenantStats(
            tenant=account.tenant,
            lane=lane_number(account.lane),  # type: ignore[arg-type]
            weight=account.weight,
            virtual_tokens=account.virtual_tokens,
            running=account.running,
            waiting=account.waiting,
            input_tokens=account.input_tokens,
            cached_tokens=account.cached_tokens,
            output_tokens=account.output_tokens,
        )
        for account in accounts[:MAX_TENANTS]
    )
    return response


def _distribution(histogram: Histogram) -> Distribution:
    p50, p90, p99 = histogram.quantiles(0.5, 0.9, 0.99)
    return Distribution(count=histogram.count, sum=histogram.sum, p50=p50, p90=p90, p99=p99)
