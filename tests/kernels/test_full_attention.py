"""Attention in both directions over texts side by side."""

import itertools
import math

import pytest
import torch

from tests.kernels.tensors import random
from trunkline_kernels.full_attention import WINDOW_QUERIES, full_attention

LENGTHS = [1, 2, 40, WINDOW_QUERIES - 1, WINDOW_QUERIES, WINDOW_QUERIES + 3, 7]


def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    """[n, H, D] of one text, in float64."""
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) / math.sqrt(q.shape[2])
    positions = torch.arange(len(q))
    if window is not None:
        scores = scores.masked_fill((positions[:, None] - positions).abs() > window, -math.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.double())


@pytest.mark.parametrize("is_invariant", [True, False])
@pytest.mark.parametrize("window", [None, 0, 1, 5, 64, WINDOW_QUERIES + 1])
def test_every_token_sees_its_own_text_or_a_window_of_it_on_both_sides(window: int | None, is_invariant: bool) -> None:
    q, k, v = random(sum(LENGTHS), 3, 2, 24).unbind(1)  # not contiguous, as an encoder has them
    found = full_attention(q, k, v, LENGTHS, window=window, is_invariant=is_invariant)
    bounds = [0, *itertools.accumulate(LENGTHS)]
    expected = [naive(q[a:b], k[a:b], v[a:b], window) for a, b in itertools.pairwise(bounds)]
    torch.testing.assert_close(found, torch.cat(expected).float())


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_text_has_the_same_bits_whichever_texts_are_beside_it(window: int | None, dtype: torch.dtype) -> None:
    lengths = [3, 130, 17]
    q, k, v = random(sum(lengths), 3, 2, 24).to(dtype).unbind(1)
    together = torch.split(full_attention(q, k, v, lengths, window=window), lengths)
    parts = zip(*(torch.split(x, lengths) for x in (q, k, v)), strict=True)
    for beside, (own_q, own_k, own_v), length in zip(together, parts, lengths, strict=True):
        assert torch.equal(full_attention(own_q, own_k, own_v, [length], window=window), beside)
