"""Attention of decodes to a common prefix: the keys of blocks that several sequences share are read once for all.

The query heads of many sequences are the rows of one tile, as in a prefill chunk, but every row sees every key.
decode_attention computes the rest of each sequence, and merges the two results.

Reference: trunkline_kernels.paged_attention, which reads the prefix once per sequence. Source: Hydragen (Juravsky et
al., 2024); cascade inference (FlashInfer; Ye et al., 2024).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from trunkline_kernels.gpu.attention_tile import LOG2_E, attend_tile, blocks_at
from trunkline_kernels.gpu.ragged_attention import RaggedTiling
from trunkline_kernels.ragged_batch import KVLayer


@triton.jit
def _attend_prefix(
    q,  # [num_seqs, num_heads, HEAD_DIM]
    keys, values,  # the pool: [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM]
    tiles,  # [num_tiles, 5] int32: see SharedPrefixes
    block_tables,  # [.., max_blocks] int32
    partial_out,  # [num_tiles, TILE_SEQS, num_heads, HEAD_DIM] float32 ← not yet divided by the total
    partial_stats,  # [num_tiles, TILE_SEQS, num_heads, 2] float32 ← peak (base 2), total
    key_scale,  # [1] float32; not read unless SCALED
    scale,
    table_stride,
    block_stride,
    slot_stride,
    num_heads,
    GROUP: tl.constexpr,  # query heads of a KV head
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """Grid: (num_kv_heads, num_tiles)."""
    TILE_SEQS: tl.constexpr = TILE_ROWS // GROUP
    kv_head = tl.program_id(0)
    tile = tl.program_id(1).to(tl.int64)
    row = tl.load(tiles + tile * 5)
    if row < 0:
        return
    first = tl.load(tiles + tile * 5 + 1)
    count = tl.load(tiles + tile * 5 + 2)
    begin = tl.load(tiles + tile * 5 + 3)
    end = tl.load(tiles + tile * 5 + 4)

    rows = tl.arange(0, TILE_ROWS)
    dim = tl.arange(0, PADDED_DIM)
    member = rows // GROUP
    known = (member < count) & (rows < TILE_SEQS * GROUP)
    head = kv_head * GROUP + rows % GROUP
    place = ((first + member).to(tl.int64) * num_heads + head) * HEAD_DIM
    inside = known[:, None] & (dim < HEAD_DIM)[None, :]
    queries = tl.load(q + place[:, None] + dim[None, :], mask=inside, other=0.0)
    query_positions = tl.where(known, end, -1)
    if SCALED:
        scale = scale * tl.load(key_scale)

    keys += kv_head * HEAD_DIM
    values += kv_head * HEAD_DIM
    table = block_tables + row.to(tl.int64) * table_stride
    acc = tl.zeros([TILE_ROWS, PADDED_DIM], tl.float32)
    peak = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    whole = begin + (end - begin) // TILE_KEYS * TILE_KEYS
    blocks = blocks_at(table, begin, end, BLOCK_SIZE, TILE_KEYS)
    for start in tl.range(begin, whole, TILE_KEYS):
        acc, peak, total = attend_tile(
            queries, acc, peak, total, keys, values, blocks, start, end, query_positions, scale, 0,
            block_stride, slot_stride, False, False, BLOCK_SIZE, HEAD_DIM, PADDED_DIM, TILE_KEYS,
        )  # fmt: skip
        blocks = blocks_at(table, start + TILE_KEYS, end, BLOCK_SIZE, TILE_KEYS)
    blocks = blocks_at(table, whole, end, BLOCK_SIZE, TILE_KEYS)
    for start in tl.range(whole, end, TILE_KEYS):
        acc, peak, total = attend_tile(
            queries, acc, peak, total, keys, values, blocks, start, end, query_positions, scale, 0,
            block_stride, slot_stride, True, False, BLOCK_SIZE, HEAD_DIM, PADDED_DIM, TILE_KEYS,
        )  # fmt: skip
        blocks = blocks_at(table, start + TILE_KEYS, end, BLOCK_SIZE, TILE_KEYS)
    place = (tile * TILE_SEQS + member) * num_heads + head
    tl.store(partial_out + place[:, None] * HEAD_DIM + dim[None, :], acc, mask=inside)
    tl.store(partial_stats + place * 2, peak, mask=known)
    tl.store(partial_stats + place * 2 + 1, total, mask=known)


@dataclass(frozen=True, slots=True)
class PrefixRoom:
    """Room for the results of tiles."""

    partial_out: Tensor  # [num_tiles, tile_seqs, num_heads, head_dim] float32
    partial_stats: Tensor  # [num_tiles, tile_seqs, num_heads, 2] float32

    @classmethod
    def allocate(
        cls, *, num_tiles: int, tile_seqs: int, num_heads: int, head_dim: int, device: torch.device
    ) -> "PrefixRoom":
        """Allocates room for `num_tiles` tiles of up to `tile_seqs` sequences."""

        def room(width: int) -> Tensor:
            return torch.empty(num_tiles, tile_seqs, num_heads, width, dtype=torch.float32, device=device)

        return cls(room(head_dim), room(2))


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """The prefixes that decodes of a step share. The sequences of a prefix are adjacent.

    A tile is up to `tile_seqs` sequences and one piece of their prefix. The pieces of the same sequences are
    consecutive tiles.
    """

    # [num_tiles, 5] int32: row of block_tables (-1: padding), first sequence, number of sequences, first token, end
    tiles: Tensor
    # [num_seqs, 3] int32, of the step's decodes: tokens of the prefix, its first tile, its number of tiles; or zeros
    of_sequence: Tensor
    room: PrefixRoom


def shared_prefix(
    q: Tensor,
    kv: KVLayer,
    prefixes: SharedPrefixes,
    *,
    block_tables: Tensor,
    tiling: RaggedTiling,
    scale: float,
) -> None:
    """Computes attention of decodes to their shared prefixes. decode_attention merges the results, in `prefixes.room`.

    q: [num_seqs, num_heads, head_dim]; block_tables: [.., max_blocks] int32
    tiling: ragged_attention's; its rows hold the query heads of tile_seqs sequences
    """
    if not len(prefixes.tiles):
        return
    _, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = kv.keys.shape
    group = num_heads // num_kv_heads
    assert prefixes.room.partial_out.shape[1] == tiling.tokens(group), "the room is for tiles of another size"
    scaled = kv.key_scale is not None
    _attend_prefix[(num_kv_heads, len(prefixes.tiles))](
        q, kv.keys, kv.values, prefixes.tiles, block_tables, prefixes.room.partial_out, prefixes.room.partial_stats,
        kv.key_scale if scaled else q, scale * LOG2_E.value, block_tables.stride(0), kv.block_stride,
        num_kv_heads * head_dim, num_heads,
        group, head_dim, max(16, triton.next_power_of_2(head_dim)), block_size, tiling.rows, tiling.keys,
        scaled, num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
