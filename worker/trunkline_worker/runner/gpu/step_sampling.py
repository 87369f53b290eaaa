"""Samples on the device: the host sends its inputs in few copies, and the tokens are written to their rows."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trunkline_kernels.gpu.device_rows import DeviceRows
from trunkline_kernels.gpu.logit_changes import add_bias, exclude, penalise
from trunkline_kernels.gpu.logprobs import logprobs
from trunkline_kernels.gpu.sampling import sample
from trunkline_kernels.token_masks import RowMasks
from trunkline_worker.runner.gpu.row_table import TableRow
from trunkline_worker.runner.gpu.transfers import to_device
from trunkline_worker.runner.sampler import changes_logits, is_penalised
from trunkline_worker.step.plan import PositionLogprobs, RowError

NOTHING: Mapping[int, Any] = {}


@dataclass(frozen=True, slots=True)
class StepSamples:
    """A step's new tokens and their log-probabilities, on the device."""

    tokens: Tensor  # [num_samples] int64; below 0: see sampler.FAILURES
    asking: list[int]  # indices of the samples whose log-probabilities are requested
    logprobs: list[Tensor]  # of these samples: [num_asking] token ids, then the columns of logprobs(); or empty


def sample_step(
    logits: Tensor,
    rows: list[TableRow],
    device_rows: DeviceRows,
    *,
    forced: Mapping[int, int] = NOTHING,
    masks: Mapping[int, NDArray[np.int32]] = NOTHING,
) -> StepSamples:
    """Samples the next token of each row, by the rules of sampler.sample, and appends it to the row.

    logits: [num_rows, vocab] float32, overwritten
    forced: tokens that are in their rows already, by index of the row: only their log-probabilities are of interest
    masks: [ceil(vocab / 32)] by index of the row
    """
    device = logits.device
    asking = [i for i, row in enumerate(rows) if row.sampling.logprobs is not None]
    places = np.array([(row.index, row.num_tokens) for row in rows], np.int32)
    if forced:
        places[list(forced), 1] = device_rows.tokens.shape[1]  # past the end of the row: nothing is written
    arrays: list[NDArray[np.int32 | np.int64]] = [places]
    if asking:
        arrays.append(np.array(asking, np.int64))
    if masks:
        arrays += [np.array(list(masks), np.int64), np.stack(list(masks.values()))]
    samples, *sent = to_device(arrays, device)
    raw = logits[sent[0]] if asking else None
    _adjust(logits, rows, device_rows)
    if masks:
        exclude(logits, RowMasks(*sent[-2:]))
    tokens = sample(logits, samples, device_rows, draws=any(row.sampling.temperature > 0 for row in rows))
    columns: list[Tensor] = []
    if raw is not None:
        chosen = tokens[sent[0]]
        if forced:
            (given,) = to_device([np.array([forced.get(i, -1) for i in asking], np.int64)], device)
            chosen = torch.where(given < 0, chosen, given)
        most = max(rows[i].sampling.logprobs or 0 for i in asking)
        columns = [chosen, *logprobs(raw, chosen, min(most, raw.shape[1]))]
    for row in rows:
        row.num_tokens += 1
    return StepSamples(tokens, asking, columns)


def _adjust(logits: Tensor, rows: list[TableRow], device_rows: DeviceRows) -> None:
    """Applies bias, penalties and min_tokens by the rules of penalties.adjust_logits. Forbidden tokens are set to -inf
    first; no later change makes them finite."""
    arrays: list[NDArray[np.int32 | np.float32]] = []
    penalised: list[tuple[int, int, int]] = []
    for i, row in enumerate(rows):
        try:
            if not changes_logits(row):
                continue
            s = row.sampling
            if s.logit_bias or row.num_output < s.min_tokens:
                arrays += _bias(i, row)
            if is_penalised(s):
                penalised.append((i, row.index, row.num_tokens))
        except Exception as error:  # one row's error must not fail the other rows' step
            row.error = RowError.of_bug(error)
    if arrays:
        columns = [np.concatenate(arrays[column::3]) for column in range(3)]
        add_bias(logits, *to_device(columns, logits.device))
    if penalised:
        (where,) = to_device([np.array(penalised, np.int32)], logits.device)
        penalise(logits, where, device_rows, max(count for _, _, count in penalised))


def _bias(at: int, row: TableRow) -> list[NDArray[np.int32 | np.float32]]:
    """Returns the biases of one row, each [num_biases]: the row's index in the logits, token ids, and values to add.
    A value of -inf forbids a token."""
    s = row.sampling
    out = s.end_token_ids if row.num_output < s.min_tokens else frozenset()
    entries = [(token, bias) for token, bias in s.logit_bias if token not in out]
    ids, bias = [token for token, _ in entries], [number for _, number in entries]
    ids += out
    bias += [-math.inf] * len(out)
    return [np.full(len(ids), at, np.int32), np.array(ids, np.int32), np.array(bias, np.float32)]


def logprob_entries(columns: list[Tensor], wanted: list[int]) -> list[PositionLogprobs]:
    """Returns the entries of the columns of StepSamples.logprobs, on the host. wanted: number of top tokens of each"""
    found: list[PositionLogprobs] = []
    for count, token_id, logprob, rank, ids, values in zip(
        wanted, *(column.tolist() for column in columns), strict=True
    ):
        found.append(PositionLogprobs(token_id, logprob, rank, list(zip(ids[:count], values[:count], strict=True))))
    return found
