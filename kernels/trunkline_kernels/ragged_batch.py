"""What a step's kernels need to know of its ragged batch, and where keys and values lie."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """The new tokens of several sequences, laid end to end with no padding, and where each one's KV lies.

    Prefill chunks and decodes are the same thing here: a sequence with `query_len` new tokens whose KV, new tokens
    included, is `context_len` tokens long. Every sequence has at least one new token.
    """

    positions: Tensor  # [num_tokens] int64: position of each new token in its sequence
    slots: Tensor  # [num_tokens] int64: block * block_size + offset, where the token's KV is written
    query_lens: list[int]  # [num_seqs]
    context_lens: list[int]  # [num_seqs]
    block_tables: Tensor  # [num_seqs, max_blocks] int64, on the host; entries past a sequence's context are arbitrary
    block_size: int


@dataclass(frozen=True, slots=True)
class KVLayer:
    """One layer's part of the KV pool.

    One block more than the pool's blocks: the last one is never written and stays zero. Padding reads from it, so
    whatever a freed block still holds (a NaN of a broken request, say) cannot reach another request.
    """

    keys: Tensor  # [num_blocks + 1, block_size, num_kv_heads, head_dim]
    values: Tensor  # [num_blocks + 1, block_size, num_kv_heads, head_dim]
    # [1] float32 each, where the pool holds 8-bit numbers: what is stored is multiplied by them.
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None

    @property
    def block_stride(self) -> int:
        """Elements from one block of keys to the next, and likewise of values. A block's own elements lie together."""
        return self.keys.stride(0)

    @property
    def zero_slot(self) -> int:
        """A slot that reads as zero."""
        return (self.keys.shape[0] - 1) * self.keys.shape[1]


def allocate_kv(
    *,
    num_layers: int,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    whole_blocks: bool = False,
) -> list[KVLayer]:
    """An empty pool. Only the zero block is written: memory that no sequence has used yet stays untouched.

    Of 8-bit floats the scales are 1: normed keys, and values, lie well within their range.
    whole_blocks: keys and values of a block lie together over all layers, so that one copy moves a block. The Triton
    kernels take such a pool; the others need each layer's keys, and its values, in one piece.
    """
    shape = (num_blocks + 1, block_size, num_kv_heads, head_dim)
    scale = torch.ones(1, device=device) if dtype.itemsize == 1 else None
    if whole_blocks:
        whole = torch.empty(num_blocks + 1, num_layers, 2, *shape[1:], dtype=dtype, device=device)
        whole[-1] = 0
        return [KVLayer(whole[:, layer, 0], whole[:, layer, 1], scale, scale) for layer in range(num_layers)]

    def pool() -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=device)
        tensor[-1] = 0
        return tensor

    return [KVLayer(pool(), pool(), scale, scale) for _ in range(num_layers)]
