"""A step's ragged batch in the form that the Triton kernels read."""

from dataclasses import dataclass

from torch import Tensor

from trunkline_kernels.gpu.decode_plan import DecodePlan
from trunkline_kernels.gpu.prompt_attention import FreshPrompts
from trunkline_kernels.gpu.ragged_attention import Pieces
from trunkline_kernels.gpu.shared_prefix import SharedPrefixes


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """The new tokens of several sequences, concatenated. Sequences with one new token come first.

    All tensors are on the device. There may be two kinds of padding, whose results are not used: tokens after the last
    sequence's, and sequences without new tokens. Counts in shapes include padding.
    """

    token_ids: Tensor  # [num_tokens] int64
    positions: Tensor  # [num_tokens] int64
    slots: Tensor  # [num_tokens] int64: the KV slot that a token writes; negative: none, the token is padding
    query_starts: Tensor  # [num_seqs + 1] int32: index of each sequence's first token; the last is the end
    context_lens: Tensor  # [num_seqs] int32: tokens of each sequence, including new ones
    rows: Tensor  # [num_seqs] int32: row of block_tables of each sequence
    block_tables: Tensor  # [num_rows, max_blocks] int32
    tiles: Tensor  # [num_tiles, 4] int32: of sequences that ragged_attention computes, see ragged_attention.Tiles
    pieces: Pieces | None  # results of tiles that are pieces of a context; None: contexts are not split
    # [num_decodes] int32: context lengths of the first sequences, which decode_attention computes; 0: padding
    decode_lens: Tensor
    decode_plan: DecodePlan  # how decode_attention divides these contexts
    prefixes: SharedPrefixes  # common prefixes of these sequences
    fresh: FreshPrompts | None = None  # the last sequences, if prompt_attention computes them
