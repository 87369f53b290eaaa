"""Packed masks: which tokens a row may get.

Bit t % 32 of word t // 32 says whether token t is allowed. Tokens past the last word are excluded.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad


class RowMasks(NamedTuple):
    """The masks of some rows of a batch. The other rows may get any token."""

    rows: Tensor  # [num_masks] int64, none twice
    words: Tensor  # [num_masks, num_words] int32


def exclude(logits: Tensor, masks: RowMasks) -> None:
    """Sets the logits of excluded tokens to -inf, in place. Infinity and NaN stay: they show that a row is broken.

    logits: [num_rows, vocab]
    """
    vocab, bits = logits.shape[1], torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = (masks.words[:, :, None] >> bits & 1).flatten(1)[:, :vocab]  # [num_masks, vocab]
    x = logits[masks.rows]
    excluded = (pad(allowed, (0, vocab - allowed.shape[1])) == 0) & (x < math.inf)
    logits[masks.rows] = x.masked_fill(excluded, -math.inf)
