"""A step's ragged batch for the C kernels. It has the addresses of block tables, so nothing is copied."""

from dataclasses import dataclass

from torch import Tensor


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
