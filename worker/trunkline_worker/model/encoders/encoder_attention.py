"""Attention in both directions over whole texts, by each kind of kernels."""

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from trunkline_kernels.cpu.text_attention import TextAttention
from trunkline_kernels.full_attention import full_attention


class Attention(Protocol):
    """Attention of the texts of a step."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, window: int | None) -> Tensor:
        """Every token of a text attends to all of its tokens, or to those at most `window` positions away.

        q, k, v: [num_tokens, num_heads, head_dim], text after text; the heads of a token lie side by side → like q
        """


AttentionOf = Callable[[Sequence[int]], Attention]  # takes the lengths of the texts


def torch_attention(*, is_invariant: bool) -> AttentionOf:
    """In plain PyTorch.  is_invariant: a text's result does not depend on the others"""
    return lambda lengths: partial(full_attention, lengths=lengths, is_invariant=is_invariant)


def c_attention(kernels: ctypes.CDLL, head_dim: int) -> AttentionOf:
    """By the C kernel, on a CPU."""
    return lambda lengths: TextAttention(kernels, lengths, head_dim).of


def triton_attention(dtype: torch.dtype, device: torch.device) -> AttentionOf:
    """By the Triton kernel. Triton is not available on every system."""
    from trunkline_kernels.gpu.text_attention import text_attention, tiles_of_texts

    return lambda lengths: partial(text_attention, tiles=torch.from_numpy(tiles_of_texts(lengths, dtype)).to(device))
