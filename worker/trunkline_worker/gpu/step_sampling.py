"""Sampling where the logits are: what the host adds goes there in one copy, and the tokens go into their rows."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from trunkline_kernels.gpu.device_rows import DeviceRows
from trunkline_kernels.gpu.logit_changes import add_bias, penalise
from trunkline_kernels.gpu.logprobs import logprobs
from trunkline_kernels.gpu.sampling import sample
from trunkline_worker.execution.penalties import changes_logits
from trunkline_worker.gpu.row_table import TableRow
from trunkline_worker.gpu.to_device import to_device
from trunkline_worker.step.plan import PositionLogprobs, RowError


@dataclass(frozen=True, slots=True)
class StepSamples:
    """A step's new tokens, on the device, and what is to be told about them."""

    tokens: Tensor  # [num_samples] int64; -1: the logits are not finite
    asking: list[int]  # samples whose log-probabilities are asked for
    logprobs: list[Tensor]  # of those: token ids and the columns of logprobs(); or nothing


def sample_step(logits: Tensor, rows: list[TableRow], device_rows: DeviceRows) -> StepSamples:
    """The next token of each row, as sampler.sample chooses it; it is in its row then, and the row is one longer.

    logits: [num_rows, vocab] float32, overwritten
    """
    device = logits.device
    asking = [i for i, row in enumerate(rows) if row.sampling.logprobs is not None]
    samples, *indices = to_device(
        [
            np.array([(row.index, row.num_tokens) for row in rows], np.int32),
            *([np.array(asking, np.int64)] if asking else []),
        ],
        device,
    )
    raw = logits[indices[0]] if asking else None
    _adjust(logits, rows, device_rows)
    tokens = sample(logits, samples, device_rows, draws=any(row.sampling.temperature > 0 for row in rows))
    columns: list[Tensor] = []
    if raw is not None:
        chosen = tokens[indices[0]]
        most = max(rows[i].sampling.logprobs or 0 for i in asking)
        columns = [chosen, *logprobs(raw, chosen, min(most, raw.shape[1]))]
    for row in rows:
        row.num_tokens += 1
    return StepSamples(tokens, asking, columns)


def _adjust(logits: Tensor, rows: list[TableRow], device_rows: DeviceRows) -> None:
    """Bias, penalties and min_tokens, as penalties.adjust_logits has them. Tokens that are out go first: nothing brings
    them back."""
    arrays: list[NDArray[np.int32 | np.float32]] = []
    penalised: list[tuple[int, int, int]] = []
    for i, row in enumerate(rows):
        try:
            if not changes_logits(row):
                continue
            s = row.sampling
            if s.logit_bias or row.num_output < s.min_tokens:
                arrays += _bias(i, row)
            if s.repetition_penalty != 1.0 or s.presence_penalty or s.frequency_penalty:
                penalised.append((i, row.index, row.num_tokens))
        except Exception as error:  # whatever it was, it must not cost the other rows their step
            row.error = RowError.of_bug(error)
    if arrays:
        columns = [np.concatenate(arrays[column::3]) for column in range(3)]
        add_bias(logits, *to_device(columns, logits.device))
    if penalised:
        (where,) = to_device([np.array(penalised, np.int32)], logits.device)
        penalise(logits, where, device_rows, max(count for _, _, count in penalised))


def _bias(at: int, row: TableRow) -> list[NDArray[np.int32 | np.float32]]:
    """What is added to the logits of a row: its place among them, token ids and numbers, of which -inf rules a token
    out."""
    s = row.sampling
    out = s.end_token_ids if row.num_output < s.min_tokens else frozenset()
    entries = [(token, bias) for token, bias in s.logit_bias if token not in out]
    ids, bias = [token for token, _ in entries], [number for _, number in entries]
    ids += out
    bias += [-math.inf] * len(out)
    return [np.full(len(ids), at, np.int32), np.array(ids, np.int32), np.array(bias, np.float32)]


def told_logprobs(columns: list[Tensor], wanted: list[int]) -> list[PositionLogprobs]:
    """Columns of StepSamples.logprobs, on the host, as entries.  wanted: likeliest tokens to tell, for each"""
    found: list[PositionLogprobs] = []
    for count, token_id, logprob, rank, ids, values in zip(
        wanted, *(column.tolist() for column in columns), strict=True
    ):
        found.append(PositionLogprobs(token_id, logprob, rank, list(zip(ids[:count], values[:count], strict=True))))
    return found
