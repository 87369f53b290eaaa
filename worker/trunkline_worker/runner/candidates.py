"""Selects the tokens of a row that may be drawn: top_k, then top_p over the tokens that top_k keeps, and min_p.

top_k keeps every token whose logit is at least the k-th largest one, so equal logits are treated equally. top_p keeps
the smallest nucleus: of equal logits at its edge, those of the lowest token ids.

The row's highest logit is subtracted before the division by the temperature. The highest is then 0 and the others are
negative, so an overflow never changes a value that is compared or drawn, and the most likely token always stays.
"""

from math import log
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trunkline_worker.step.plan import Sampling
from trunkline_worker.step.sampling_key import NOISE_SPREAD

# The nucleus of top_p is searched in this many most likely tokens before the whole row is sorted.
NUCLEUS_GUESS = 256


class Candidates(NamedTuple):
    """Candidate tokens of one or several rows, ordered by row, then by token id."""

    rows: NDArray[np.int64]  # [num_candidates] index of the row
    ids: NDArray[np.int64]  # [num_candidates] token id
    scaled: NDArray[np.float64]  # [num_candidates] (logit - highest logit) / temperature


def is_narrowed(s: Sampling, vocab: int) -> bool:
    """Whether top_k or top_p may exclude tokens."""
    return 0 < s.top_k < vocab or s.top_p < 1.0


def likely(logits: Tensor, highest: Tensor, samplings: list[Sampling]) -> Candidates:
    """Returns the candidates of rows that are not narrowed.

    logits: [num_rows, vocab], overwritten; highest: [num_rows, 1] finite
    """
    temperature = torch.tensor([s.temperature for s in samplings])[:, None]
    scaled = logits.sub_(highest).div_(temperature)
    least = torch.tensor([_least(s) for s in samplings])[:, None]
    rows, ids = (scaled >= least).nonzero(as_tuple=True)
    return Candidates(rows.numpy(), ids.numpy(), scaled[rows, ids].numpy().astype(np.float64))


def narrowed(logits: Tensor, highest: Tensor, s: Sampling, row: int) -> Candidates:
    """Returns the candidates of one row that is narrowed. logits: [vocab]; highest: [1] finite; row: its index"""
    ids: Tensor | None = None
    if 0 < s.top_k < len(logits):
        ids = (logits >= logits.topk(s.top_k).values[-1]).nonzero()[:, 0]
    values = logits if ids is None else logits[ids]
    scaled = (values - highest) / s.temperature
    kept = scaled >= _least(s)
    if s.top_p < 1.0:
        kept &= _nucleus(values, scaled.exp(), s.top_p)
    places = kept.nonzero()[:, 0]
    ids = places if ids is None else ids[places]
    return Candidates(np.full(len(ids), row, np.int64), ids.numpy(), scaled[places].numpy().astype(np.float64))


def _least(s: Sampling) -> float:
    """Returns the smallest scaled logit that can be drawn. Noise cannot make up for more than its own spread."""
    return max(-NOISE_SPREAD, log(s.min_p)) if s.min_p else -NOISE_SPREAD


def _nucleus(logits: Tensor, weights: Tensor, top_p: float) -> Tensor:
    """Returns a mask of the fewest tokens whose weights sum to top_p of the total: [num_tokens] bool, not all false.

    logits: [num_tokens]; they define the order, because they distinguish more tokens than the weights do
    """
    target = top_p * float(weights.sum(dtype=torch.float64))
    size = min(NUCLEUS_GUESS, len(logits))
    while True:
        largest = logits.topk(size)
        mass = weights[largest.indices].double().cumsum(0)
        if size == len(logits) or float(mass[-1]) >= target:
            break
        size = len(logits)
    count = min(int((mass < target).sum()) + 1, size)
    edge = largest.values[count - 1]
    inside = logits > edge
    equal = (logits == edge).nonzero()[:, 0]
    inside[equal[: count - int(inside.sum())]] = True
    return inside
