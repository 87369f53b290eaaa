"""Attention of prompts without cached context, by torch's kernel, on contiguous keys and values.

A prompt whose first new token is at position 0 attends only to its new tokens, so nothing is read from the pool. The
tiling sweep of `make bench-gpu` measures on a device whether torch's kernel (FlashAttention) or ragged_attention is
faster for such prompts. Without a measurement, ragged_attention computes them.

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

KERNEL = "prompt_attention"  # in the table of tilings; an entry without numbers means that the library was faster
OWN = {"own": 1}  # the entry if ragged_attention was faster
LIBRARY_TYPES = (torch.bfloat16, torch.float16)
LIBRARY_HEAD_DIM = 256  # most that FlashAttention supports; it must also be a multiple of 8


@dataclass(frozen=True, slots=True)
class FreshPrompts:
    """Prompts of a step without earlier context. Their tokens are consecutive rows of the step."""

    first_row: int
    num_rows: int
    longest: int  # most tokens of one prompt
    starts: Tensor  # [num_prompts + 1] int32, on the device: first row of each prompt, relative to first_row; the end

    @property
    def rows(self) -> slice:
        """The rows of all prompts among the step's tokens."""
        return slice(self.first_row, self.first_row + self.num_rows)


def key_of(*, device: str, head_dim: int, group: int, dtype: torch.dtype, kv_dtype: torch.dtype) -> TilingKey:
    """Returns the key of the choice in the table. device: its name; group: query heads of a KV head"""
    return TilingKey.of(KERNEL, device=device, head_dim=head_dim, group=group, dtype=dtype, kv_dtype=kv_dtype)


def library_is_chosen(key: TilingKey, device: torch.device) -> bool:
    """Whether the table says that the library is faster, and the library supports these heads. Raises ValueError if
    the file is not a table."""
    return tuned(key) == {} and library_takes(key, device)


def library_takes(key: TilingKey, device: torch.device) -> bool:
    """Whether torch has a kernel for these heads. 8-bit keys are excluded: they are rounded in the pool only."""
    if key.dtype != key.kv_dtype:
        return False
    typed = getattr(torch, key.dtype) in LIBRARY_TYPES
    return device.type == "cpu" or (typed and key.head_dim <= LIBRARY_HEAD_DIM and key.head_dim % 8 == 0)


def prompt_attention(
    q: Tensor, keys: Tensor, values: Tensor, fresh: FreshPrompts, *, scale: float, window: int | None = None
) -> Tensor:
    """Computes causal attention of each prompt to itself.

    q: [num_rows, num_heads, head_dim]; keys, values: [num_rows, num_kv_heads, head_dim]; rows need not be contiguous
    window: a query sees this many last positions, including its own; None: all
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
    """Returns torch's function and its option for grouped-query attention, which torch before 2.12 does not need."""
    # Imported only if it is used, because it imports torch's compiler.
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def _one_by_one(
    q: Tensor, keys: Tensor, values: Tensor, fresh: FreshPrompts, *, scale: float, window: int | None
) -> Tensor:
    """Computes the same on a CPU, where torch has no kernel for several lengths at once."""
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
