"""A step's ragged batch, for the reference kernels and for those in C, and the pool of keys and values."""

from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes, of vectorised loads on a GPU


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
    """One layer's view of the KV pool.

    It has one block more than the pool. That last block is never written and stays zero. Padding reads from it, so the
    contents of a freed block (such as a NaN of a broken request) cannot reach another request.

    Keys of one block are contiguous, and so are its values. From block to block they are `block_stride` apart.
    """

    keys: Tensor  # [num_blocks + 1, block_size, num_kv_heads, head_dim]
    values: Tensor  # [num_blocks + 1, block_size, num_kv_heads, head_dim]
    # [1] float32 each, if the pool holds 8-bit numbers: stored values are multiplied by them.
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None

    @property
    def block_stride(self) -> int:
        """Elements from one block of keys, or of values, to the next."""
        return self.keys.stride(0)

    @property
    def block_rows(self) -> int:
        """Rows of by_token() from one block to the next."""
        return self.keys.stride(0) // self.keys.stride(1)

    @property
    def zero_row(self) -> int:
        """The row of by_token() for padding, which always contains zeros."""
        return (self.keys.shape[0] - 1) * self.block_rows

    def by_token(self) -> tuple[Tensor, Tensor]:
        """Returns views of keys and values by token: [num_rows, num_kv_heads * head_dim]. A block's token at `offset`
        is row block * block_rows + offset. The rows between two blocks belong to other layers."""
        width, rows = self.keys.stride(1), self.zero_row + self.keys.shape[1]
        return self.keys.as_strided((rows, width), (width, 1)), self.values.as_strided((rows, width), (width, 1))


@dataclass(frozen=True, slots=True)
class KVPool:
    """Keys and values of all blocks. A block is contiguous over layers, so that one copy moves it.

    On a GPU, each layer's keys, and values, of a block begin at a multiple of ALIGNMENT bytes.
    """

    blocks: Tensor  # [num_blocks + 1, num_layers, 2 (keys, values), block_size, num_kv_heads, head_dim]
    layers: list[KVLayer]  # views

    @property
    def whole_blocks(self) -> Tensor:
        """A view of each block as one run of bytes: [num_blocks + 1, bytes of a block] uint8."""
        return self.blocks.view(len(self.blocks), -1).view(torch.uint8)

    def copy(self, source: int, target: int) -> None:
        """Copies a block, or puts the copy on the device's queue."""
        whole = self.whole_blocks
        whole[target].copy_(whole[source])


def allocate_kv(
    *,
    num_layers: int,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> KVPool:
    """Allocates an empty pool. Only the zero block is written: unused memory stays untouched.

    The scales of 8-bit floats are 1, because normed keys, and values, are well within their range.
    """
    blocks = torch.empty(
        num_blocks + 1, num_layers, 2, block_size, num_kv_heads, head_dim, dtype=dtype, device=device
    )  # fmt: skip
    blocks[-1] = 0
    if device.type == "cuda":
        assert blocks.stride(2) * dtype.itemsize % ALIGNMENT == 0, "block_size and head_dim are odd sizes"
    scale = torch.ones(1, device=device) if dtype.itemsize == 1 else None
    return KVPool(
        blocks, [KVLayer(blocks[:, layer, 0], blocks[:, layer, 1], scale, scale) for layer in range(num_layers)]
    )


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
