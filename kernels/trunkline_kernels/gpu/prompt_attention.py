"""Attention of prompts without cached context by torch's own kernel, on keys and values that lie side by side.

A prompt whose first new token is at position 0 attends to its new tokens alone, so nothing need be read from the pool.
Whether torch's kernel (FlashAttention) or ragged_attention computes such prompts is what the tiling sweep of
`make bench-gpu` has measured on the device; where nothing was measured, ragged_attention does.

Reference: trunkline_kernels.paged_attention.
"""

import inspect
import itertools
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from trunkline_kernels.gpu.tuned_tilings import TilingKey, tuned

KERNEL = "prompt_attention"  # in the table of tilings: without numbers, the library was faster
OWN = {"own": 1}  # what the table says otherwise
LIBRARY_TYPES = (torch.bfloat16, torch.float16)
LIBRARY_HEAD_DIM = 256  # the most that FlashAttention takes; and a multiple of 8


@dataclass(frozen=True, slots=True)
class FreshPrompts:
    """Sequences of a step whose contexts are their new tokens. Their rows are consecutive."""

    first_row: int
    num_rows: int
    longest: int  # tokens of one
    starts: Tensor  # [num_prompts + 1] int32, on the device: rows from first_row on

    @property
    def rows(self) -> slice:
        return slice(self.first_row, self.first_row + self.num_rows)


def key_of(*, device: str, head_dim: int, group: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> TilingKey:
    """What the table has the choice under.  device: its name; group: query heads of a KV head"""
    return TilingKey.of(KERNEL, device=device, head_dim=head_dim, group=group, dtype=dtype, kv_dtype=kv_dtype)


def library_is_chosen(key: TilingKey, device: torch.device) -> bool:
    """Whether the table says so, and the library takes such heads. Raises ValueError where the file is no table."""
    return tuned(key) == {} and library_takes(key, device)


def library_takes(key: TilingKey, device: torch.device) -> bool:
    """Whether torch has a kernel for these heads. Keys of 8 bits are rounded in the pool, so they are read there."""
    if key.dtype != key.kv_dtype:
        return False
    typed = getattr(torch, key.dtype) in LIBRARY_TYPES
    return device.type == "cpu" or (typed and key.head_dim <= LIBRARY_HEAD_DIM and key.head_dim % 8 == 0)


def prompt_attention(
    q: Tensor, keys: Tensor, values: Tensor, fresh: FreshPrompts, *, scale: float, window: int | None = None
) -> Tensor:
    """Causal attention of each prompt to itself.

    q: [num_rows, num_heads, head_dim]; keys, values: [num_rows, num_kv_heads, head_dim]; rows may lie apart
    window: a query sees this many last positions, its own included; None: all
    → [num_rows, num_heads, head_dim]
    """
    if q.device.type == "cpu":
        return _one_by_one(q, keys, values, fresh, scale=scale, window=window)
    varlen_attn, options = _library()
    left = -1 if window is None else window - 1  # the library does not count the query's own position
    out: Tensor = varlen_attn(
        q, keys, values, fresh.starts, fresh.starts, fresh.longest, fresh.longest, scale=scale, window_size=(left, 0),
        **options,
    )  # fmt: skip
    return out


@cache
def _library() -> tuple[Any, dict[str, bool]]:
    """torch's function, and what says that query heads share keys: before torch 2.12 it takes that without a word."""
    # Imported only where it is chosen: torch's compiler comes with it.
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def _one_by_one(
    q: Tensor, keys: Tensor, values: Tensor, fresh: FreshPrompts, *, scale: float, window: int | None
) -> Tensor:
    """The same on a CPU, where torch has no kernel for several lengths at once."""
    parts = []
    bounds = fresh.starts.tolist()
    for start, end in itertools.pairwise(bounds):
        position = torch.arange(end - start)
        visible = position[None] <= position[:, None]
        if window is not None:
            visible &= position[None] > position[:, None] - window
        query, key, value = (x[start:end].transpose(0, 1)[None] for x in (q, keys, values))
        found = scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scale, enable_gqa=True)
        parts.append(found[0].transpose(0, 1))
    return torch.cat(parts)
