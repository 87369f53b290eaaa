"""Mooncake's traces (Qin et al., FAST 2025): lengths, and an id for each block of 512 prompt tokens. Equal ids mean
equal prefixes up to the end of the block. Times are in buckets of about three seconds, over which requests are spread
evenly."""

from dataclasses import replace
from functools import lru_cache, partial
from itertools import groupby

from trunkline_bench.simulation.traces.trace_lines import (
    InvalidLine,
    json_object,
    lane_and_tenant,
    num_tokens_of,
    time_of,
)
from trunkline_bench.simulation.traces.trace_request import TraceRequest, random_prompt

TICKS_PER_S = 1e3
TOKENS_PER_ID = 512
LAST_BUCKET_S = 3.0


def request_of(number: int, line: str, vocab_size: int) -> TraceRequest:
    """The request of one line. Raises InvalidLine."""
    entry = json_object(line)
    time_s = time_of(entry, TICKS_PER_S)
    prompt_tokens = num_tokens_of(entry, "input_length")
    output_tokens = num_tokens_of(entry, "output_length")
    ids = entry.get("hash_ids")
    if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
        raise InvalidLine("hash_ids must be a list of whole numbers")
    needed = -(-prompt_tokens // TOKENS_PER_ID)
    if len(ids) != needed:
        raise InvalidLine(f"hash_ids has {len(ids)} entries; {prompt_tokens} tokens of input_length need {needed}")
    prompt = partial(expand, tuple(ids), prompt_tokens, vocab_size)
    lane, tenant = lane_and_tenant(entry)
    # All requests share the first block, a system prompt; the second one distinguishes conversations.
    conversation = str(ids[1]) if len(ids) > 1 else ""
    return TraceRequest(time_s, prompt_tokens, output_tokens, prompt, lane, tenant, conversation)


def spread(requests: list[TraceRequest]) -> list[TraceRequest]:
    """Spreads requests with equal times evenly over the time until the next one. They must be in order of time."""
    buckets = [list(bucket) for _, bucket in groupby(requests, key=lambda request: request.arrival_s)]
    spread_out = []
    for index, bucket in enumerate(buckets):
        start_s = bucket[0].arrival_s
        end_s = buckets[index + 1][0].arrival_s if index + 1 < len(buckets) else start_s + LAST_BUCKET_S
        step_s = (end_s - start_s) / len(bucket)
        spread_out += [replace(request, arrival_s=start_s + i * step_s) for i, request in enumerate(bucket)]
    return spread_out


def expand(ids: tuple[int, ...], prompt_tokens: int, vocab_size: int) -> list[int]:
    """The prompt tokens for a request's block ids."""
    tokens: list[int] = []
    for i in ids:
        tokens += _block(i, vocab_size)
    return tokens[:prompt_tokens]


@lru_cache(maxsize=4096)
def _block(i: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(random_prompt(i, TOKENS_PER_ID, vocab_size))
