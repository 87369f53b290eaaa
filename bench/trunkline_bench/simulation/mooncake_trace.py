"""Mooncake's traces (Qin et al., FAST 2025): lengths, and for each block of 512 prompt tokens an id that is equal where
the prefix up to there is equal. Times come in buckets of about three seconds; within one, requests are spread
evenly."""

from dataclasses import replace
from functools import lru_cache, partial
from itertools import groupby
from pathlib import Path

from trunkline_bench.simulation.traces import (
    TraceError,
    TraceRequest,
    json_lines,
    lane_and_tenant,
    num_tokens_of,
    random_prompt,
    time_of,
)

TICKS_PER_S = 1e3
TOKENS_PER_ID = 512
LAST_BUCKET_S = 3.0


def read(path: Path, vocab_size: int, limit: int | None) -> list[TraceRequest]:
    """Raises TraceError."""
    requests = []
    for line, entry in json_lines(path, limit):
        time_s = time_of(path, line, entry, TICKS_PER_S)
        prompt_tokens = num_tokens_of(path, line, entry, "input_length")
        output_tokens = num_tokens_of(path, line, entry, "output_length")
        ids = entry.get("hash_ids")
        if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
            raise TraceError(f"{path}:{line}: hash_ids must be a list of whole numbers")
        needed = -(-prompt_tokens // TOKENS_PER_ID)
        if len(ids) != needed:
            raise TraceError(
                f"{path}:{line}: hash_ids has {len(ids)} entries; {prompt_tokens} tokens of input_length need {needed}"
            )
        prompt = partial(expand, tuple(ids), prompt_tokens, vocab_size)
        lane, tenant = lane_and_tenant(path, line, entry)
        # The first block is the same system prompt for everybody; the second one tells conversations apart.
        conversation = str(ids[1]) if len(ids) > 1 else ""
        requests.append(TraceRequest(time_s, prompt_tokens, output_tokens, prompt, lane, tenant, conversation))
    return spread(sorted(requests, key=lambda request: request.arrival_s))


def spread(requests: list[TraceRequest]) -> list[TraceRequest]:
    """Requests of one time, evenly over the time until the next."""
    buckets = [list(bucket) for _, bucket in groupby(requests, key=lambda request: request.arrival_s)]
    spread_out = []
    for index, bucket in enumerate(buckets):
        start_s = bucket[0].arrival_s
        end_s = buckets[index + 1][0].arrival_s if index + 1 < len(buckets) else start_s + LAST_BUCKET_S
        step_s = (end_s - start_s) / len(bucket)
        spread_out += [replace(request, arrival_s=start_s + i * step_s) for i, request in enumerate(bucket)]
    return spread_out


def expand(ids: tuple[int, ...], prompt_tokens: int, vocab_size: int) -> list[int]:
    """The tokens that a request's ids stand for."""
    tokens: list[int] = []
    for i in ids:
        tokens += _block(i, vocab_size)
    return tokens[:prompt_tokens]


@lru_cache(maxsize=4096)
def _block(i: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(random_prompt(i, TOKENS_PER_ID, vocab_size))
