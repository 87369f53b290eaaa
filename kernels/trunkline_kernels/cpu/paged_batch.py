"""A step's ragged batch as the C kernels read it: block tables by address, nothing copied."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """The new tokens of several sequences, laid end to end. Whoever made it keeps the block tables alive."""

    token_ids: Tensor  # [num_tokens] int64
    starts: Tensor  # [num_seqs + 1] int64: first row of each sequence; the last one is num_tokens
    contexts: Tensor  # [num_seqs] int64: KV tokens of each, the new ones included
    tables: Tensor  # [num_seqs] int64: address of each block table: int64 block numbers
    block_size: int

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)
