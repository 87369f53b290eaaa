"""The C attention of encoders against its reference."""

import ctypes

import pytest
import torch
from torch import Tensor

from tests.kernels.tensors import random
from trunkline_kernels.cpu.library import built
from trunkline_kernels.cpu.text_attention import MOST_QUERIES, TextAttention
from trunkline_kernels.full_attention import full_attention

LENGTHS = [1, 2, 7, 15, 16, 19, 31, 32, 35, MOST_QUERIES + 5, 6]
# Tests of test_cpu_kernels.py compile the same.
BUILDS = {"native": ("native",), "wide": ("native", "-DLANES=16", "-DTILE=12", "-O1")}


def kernels_of(dtype: torch.dtype, build: str = "native") -> ctypes.CDLL:
    kernels = built(dtype, *BUILDS[build])
    assert kernels is not None
    return kernels


def heads(lengths: list[int], head_dim: int) -> tuple[Tensor, ...]:
    """Queries, keys and values of 3 heads: tokens are not contiguous, as an encoder has them."""
    return random(sum(lengths), 3, 3, head_dim).unbind(1)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("head_dim", [5, 24, 32, 64, 80])
@pytest.mark.parametrize("window", [None, 0, 1, 5, 64, MOST_QUERIES + 6])
def test_it_equals_the_reference_whatever_the_lengths_and_windows(
    window: int | None, head_dim: int, build: str
) -> None:
    q, k, v = heads(LENGTHS, head_dim)
    found = TextAttention(kernels_of(torch.float32, build), LENGTHS, head_dim).of(q, k, v, window=window)
    torch.testing.assert_close(found, full_attention(q, k, v, LENGTHS, window=window), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 5])
def test_it_equals_the_reference_in_bfloat16(window: int | None) -> None:
    q, k, v = (x.bfloat16() for x in heads(LENGTHS, 32))
    found = TextAttention(kernels_of(torch.bfloat16), LENGTHS, 32).of(q, k, v, window=window)
    expected = full_attention(q.float(), k.float(), v.float(), LENGTHS, window=window)
    torch.testing.assert_close(found.float(), expected, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_text_has_the_same_bits_whichever_texts_and_threads_are_beside_it(
    window: int | None, dtype: torch.dtype
) -> None:
    lengths, kernels = [3, 130, 17, MOST_QUERIES + 1], kernels_of(dtype)
    q, k, v = (x.to(dtype) for x in heads(lengths, 24))
    together = torch.split(TextAttention(kernels, lengths, 24).of(q, k, v, window=window), lengths)
    parts = zip(*(torch.split(x, lengths) for x in (q, k, v)), strict=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 2)
    try:
        for beside, own, length in zip(together, parts, lengths, strict=True):
            alone = TextAttention(kernels, [length], 24).of(own[0], own[1], own[2], window=window)
            assert torch.equal(alone, beside)
    finally:
        torch.set_num_threads(threads)


def test_values_that_are_not_finite_reach_no_other_text() -> None:
    lengths = [40, 33]
    q, k, v = heads(lengths, 32)
    expected = full_attention(q, k, v, lengths, window=None)[40:]
    k[7, 1, 3], v[20, 0, 0] = torch.nan, torch.inf
    found = TextAttention(kernels_of(torch.float32), lengths, 32).of(q, k, v, window=None)
    assert found[:40, 1].isnan().all()
    assert not found[:40, 0, 0].isfinite().any()
    assert found[:40, 2].isfinite().all()
    torch.testing.assert_close(found[40:], expected, atol=1e-5, rtol=1e-5)
