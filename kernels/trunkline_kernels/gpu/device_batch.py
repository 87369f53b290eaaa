"""A step's ragged batch as the Triton kernels read it."""

from dataclasses import dataclass

from torch import Tensor

from trunkline_kernels.gpu.decode_plan import DecodePlan
from trunkline_kernels.gpu.prompt_attention import FreshPrompts
from trunkline_kernels.gpu.ragged_attention import Pieces
from trunkline_kernels.gpu.shared_prefix import SharedPrefixes


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """The new tokens of several sequences, laid end to end. Sequences with one new token come first.

    All tensors are on the device. Both kinds of padding compute something for nobody: tokens after the last sequence's,
    and sequences without new tokens.
    """

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    slots: Tensor  # [num_tokens] int64: where a token's KV is written; negative: nowhere, a token of padding
    query_starts: Tensor  # [num_seqs + 1] int32
    context_lens: Tensor  # [num_seqs] int32: new tokens included
    rows: Tensor  # [num_seqs] int32: of block_tables
    block_tables: Tensor  # [num_rows, max_blocks] int32
    # [num_tiles, 4] int32, of those that neither decode_attention nor prompt_attention takes: see
    # ragged_attention.tiles_of
    tiles: Tensor
    pieces: Pieces | None  # of tiles that are pieces of a context
    decode_lens: Tensor  # [num_decodes] int32: contexts of those that decode_attention takes, the first ones; or 0
    decode_plan: DecodePlan  # room for cutting those
    prefixes: SharedPrefixes  # of those
    fresh: FreshPrompts | None = None  # those that prompt_attention takes, the last ones
