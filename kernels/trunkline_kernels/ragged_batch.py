"""A step's ragged batch, for the reference kernels and for those in C, and the pool of keys and values."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """The new tokens of several sequences, concatenated without padding, and the location of each sequence's KV.

    Prefill chunks and decodes are not distinguished: a sequence has `query_len` new tokens, and its KV, including new
    tokens, has `context_len` tokens. Every sequence has at least one new token.
    """

    positions: Tensor  # [num_tokens] int64: position of each new token in its sequence
    slots: Tensor  # [num_tokens] int64: block * block_size + offset, the slot of the token's KV
    query_lens: list[int]  # [num_seqs]: new tokens of each sequence
    context_lens: list[int]  # [num_seqs]: KV tokens of each sequence, including new ones
    block_tables: Tensor  # [num_seqs, max_blocks] int64, on the host; entries past a sequence's context are arbitrary
    block_size: int


@dataclass(frozen=True, slots=True)
class KVLayer:
    """One layer's part of the KV pool.

    It has one block more than the pool. That last block is never written and stays zero. Padding reads from it, so the
    contents of a freed block (such as a NaN of a broken request) cannot reach another request.
    """

    keys: Tensor  # [num_blocks + 1, block_size, num_kv_heads, head_dim]
    values: Tensor  # [num_blocks + 1, block_size, num_kv_heads, head_dim]
    # [1] float32 each, if the pool holds 8-bit numbers: stored values are multiplied by them.
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None

    @property
    def block_stride(self) -> int:
        """Elements from one block of keys, or of values, to the next. A block's own elements are contiguous."""
        return self.keys.stride(0)

    @property
    def zero_slot(self) -> int:
        """The slot for padding, which always contains zeros."""
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
    """Allocates an empty pool, and returns its part of each layer. Only the zero block is written: unused memory stays
    untouched.

    The scales of 8-bit floats are 1, because normed keys, and values, are well within their range.
    whole_blocks: keys and values of a block are contiguous over all layers, so that one copy moves a block. The Triton
    kernels support such a pool; the others need contiguous keys, and contiguous values, of each layer.
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


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """The new tokens of several sequences, concatenated. Its creator must keep the block tables alive."""

    token_ids: Tensor  # [num_tokens] int64
    starts: Tensor  # [num_seqs + 1] int64: first row of each sequence; the last one is num_tokens
    contexts: Tensor  # [num_seqs] int64: KV tokens of each sequence, including new ones
    tables: Tensor  # [num_seqs] int64: address of each block table, an array of int64 block numbers
    block_size: int

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)
