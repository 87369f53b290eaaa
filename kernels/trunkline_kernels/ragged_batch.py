"""What a step's kernels need to know of its ragged batch."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """The new tokens of several sequences, laid end to end with no padding, and where each one's KV lies.

    Prefill chunks and decodes are the same thing here: a sequence with `query_len` new tokens whose KV, new tokens
    included, is `context_len` tokens long. Every sequence has at least one new token.
    """

    positions: Tensor  # [num_tokens] int64: position of each new token in its sequence
    slots: Tensor  # [num_tokens] int64: block * block_size + offset, where the token's KV is written
    query_starts: Tensor  # [num_seqs + 1] int32: sequence i's new tokens are query_starts[i]:query_starts[i + 1]
    context_lens: Tensor  # [num_seqs] int32
    block_tables: Tensor  # [num_seqs, max_blocks] int32; entries past a sequence's context are arbitrary
    query_lens_host: list[int]  # the same on the host, for loops that must not wait for the device
    context_lens_host: list[int]


@dataclass(frozen=True, slots=True)
class KVLayer:
    """One layer's part of the KV pool."""

    keys: Tensor  # [num_blocks, block_size, num_kv_heads, head_dim]
    values: Tensor  # [num_blocks, block_size, num_kv_heads, head_dim]
