"""Which tokens of a row may be drawn: top_k, top_p over what top_k left, and min_p.

top_k keeps every token whose logit is at least the k-th largest one, so equal logits are treated equally. top_p keeps
the smallest nucleus: of equal logits at its edge, those of the lowest token ids.

Logits are shifted by the row's highest one before they are divided by the temperature. The highest is then 0 and the
others are negative, so nothing overflows to a value that is compared or drawn: the likeliest token always stays.
"""

from math import log
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trunkline_worker.step.plan import Sampling
from trunkline_worker.step.sampling_key import NOISE_SPREAD

# The nucleus of top_p is looked for among this many likeliest tokens before the whole row is sorted.
NUCLEUS_GUESS = 256


class Candidates(NamedTuple):
    """Tokens of one or several rows, row by row and in each by rising id."""

    rows: NDArray[np.int64]  # the place of each one's row
    ids: NDArray[np.int64]
    scaled: NDArray[np.float64]  # (logit - highest logit) / temperature


def is_narrowed(s: Sampling, vocab: int) -> bool:
    """Whether top_k or top_p leaves tokens out."""
    return 0 < s.top_k < vocab or s.top_p < 1.0


def likely(logits: Tensor, highest: Tensor, samplings: list[Sampling]) -> Candidates:
    """The candidates of rows that are not narrowed.

    logits: [num_rows, vocab], overwritten; highest: [num_rows, 1] finite
    """
    temperature = torch.tensor([s.temperature for s in samplings])[:, None]
    scaled = logits.sub_(highest).div_(temperature)
    least = torch.tensor([_least(s) for s in samplings])[:, None]
    rows, ids = (scaled >= least).nonzero(as_tuple=True)
    return Candidates(rows.numpy(), ids.numpy(), scaled[rows, ids].numpy().astype(np.float64))


def narrowed(logits: Tensor, highest: Tensor, s: Sampling, row: int) -> Candidates:
    """The candidates of one row that is narrowed.  logits: [vocab]; highest: [1] finite; row: its place"""
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
    """The least scaled logit that is drawn. Noise cannot lift what lies further below the peak than its spread."""
    return max(-NOISE_SPREAD, log(s.min_p)) if s.min_p else -NOISE_SPREAD


def _nucleus(logits: Tensor, weights: Tensor, top_p: float) -> Tensor:
    """The fewest tokens whose weights come to top_p of all of them: [num_tokens] bool, at least one of them true.

    logits: [num_tokens], by which they are ordered: they tell more tokens apart than the weights do
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
