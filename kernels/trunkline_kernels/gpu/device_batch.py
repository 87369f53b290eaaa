"""A step's ragged batch as the Triton kernels read it."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """The new tokens of several sequences, laid end to end. Sequences with one new token come first.

    All tensors are on the device.
    """

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    slots: Tensor  # [num_tokens] int64: where a token's KV is written; negative: nowhere, a row of padding
    query_starts: Tensor  # [num_seqs + 1] int32
    context_lens: Tensor  # [num_seqs] int32: new tokens included; 0: a row of padding
    block_tables: Tensor  # [num_seqs, max_blocks] int32
    tiles: Tensor  # [num_tiles, 2] int32: of those that decode_attention does not take; see ragged_attention.tiles_of
    num_decodes: int  # the first sequences, that have one new token each and go through decode_attention
