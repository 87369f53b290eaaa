"""Sampling where the logits are: parameters go to the device in one copy, tokens come back in one."""

import math

import numpy as np
import torch
from torch import Tensor

from trunkline_kernels.gpu import sampling as kernels
from trunkline_worker.batch_rows import Row
from trunkline_worker.penalties import changes_logits
from trunkline_worker.plan import PositionLogprobs
from trunkline_worker.sampler import NOT_FINITE, Sampled
from trunkline_worker.sampling_key import position_key
from trunkline_worker.to_device import to_device


def sample_on_device(logits: Tensor, rows: list[Row]) -> Sampled:
    """As sampler.sample, and like it a function of each row alone.  logits [num_rows, vocab] float32 is overwritten."""
    device, vocab = logits.device, logits.shape[1]
    asking = [i for i, row in enumerate(rows) if row.sampling.logprobs is not None]
    raw = logits[torch.tensor(asking, device=device)] if asking else None
    _adjust(logits, rows)
    samplings = [row.sampling for row in rows]
    keys = np.array([position_key(row.sampling.seed, row.num_tokens) for row in rows], np.uint64)
    columns = [
        np.array([s.temperature for s in samplings], np.float32),
        np.array([min(s.top_k, vocab) for s in samplings], np.int32),
        np.array([s.top_p for s in samplings], np.float32),
        np.array([s.min_p for s in samplings], np.float32),
        keys.view(np.int32).reshape(-1, 2),
    ]
    tokens = kernels.sample(logits, kernels.SamplingRows(*to_device(columns, device)))
    found = _logprobs(raw, asking, tokens, rows)
    token_ids: list[int] = tokens.tolist()
    return Sampled(
        [None if token_id < 0 else token_id for token_id in token_ids],
        {i: entry for i, entry in found.items() if token_ids[i] >= 0},
        {i: NOT_FINITE for i, token_id in enumerate(token_ids) if token_id < 0},
    )


def _adjust(logits: Tensor, rows: list[Row]) -> None:
    """Bias, min_tokens and penalties, in the order of penalties.adjust_logits."""
    entries: list[tuple[int, int, float]] = []
    penalised: list[int] = []
    for i, row in enumerate(rows):
        if not changes_logits(row):
            continue
        s = row.sampling
        out = s.end_token_ids if row.num_output < s.min_tokens else frozenset()
        entries += [(i, token, bias) for token, bias in s.logit_bias if token not in out]
        entries += [(i, token, -math.inf) for token in out]
        if s.repetition_penalty != 1.0 or s.presence_penalty or s.frequency_penalty:
            penalised.append(i)
    if entries:
        at, ids, bias = zip(*entries, strict=True)
        arrays = [np.array(at, np.int32), np.array(ids, np.int32), np.array(bias, np.float32)]
        kernels.add_bias(logits, *to_device(arrays, logits.device))
    if penalised:
        chosen = [rows[i] for i in penalised]
        history = np.zeros((len(chosen), max(row.num_tokens for row in chosen)), np.int32)
        for place, row in enumerate(chosen):
            history[place, : row.num_tokens] = row.tokens
        columns = [
            np.array(penalised, np.int32),
            history,
            np.array([row.num_tokens for row in chosen], np.int32),
            np.array([row.prompt_len for row in chosen], np.int32),
            np.array([row.sampling.repetition_penalty for row in chosen], np.float32),
            np.array([row.sampling.frequency_penalty for row in chosen], np.float32),
            np.array([row.sampling.presence_penalty for row in chosen], np.float32),
        ]
        kernels.penalise(logits, kernels.PenaltyRows(*to_device(columns, logits.device)))


def _logprobs(raw: Tensor | None, asking: list[int], tokens: Tensor, rows: list[Row]) -> dict[int, PositionLogprobs]:
    """Of the untouched distribution, by row."""
    if raw is None:
        return {}
    wanted = [rows[i].sampling.logprobs or 0 for i in asking]
    chosen = tokens[torch.tensor(asking, device=tokens.device)]
    columns = kernels.logprobs(raw, chosen, min(max(wanted), raw.shape[1]))
    found: dict[int, PositionLogprobs] = {}
    for i, count, token_id, logprob, rank, ids, values in zip(
        asking, wanted, chosen.tolist(), *(column.tolist() for column in columns), strict=True
    ):
        top = list(zip(ids[:count], values[:count], strict=True))
        found[i] = PositionLogprobs(token_id, logprob, rank, top)
    return found
