"""Attention of prefill chunks, or of any sequences with new tokens, over paged keys and values.

A program computes one tile: TILE_ROWS query rows of one sequence and one KV head. The query heads that share a KV head
are rows of the same tile, so keys are read once for all of them. The grid has exactly the tiles that exist, so that no
program of a ragged batch is wasted.

If bits must not depend on the batch, a context is split at multiples of a fixed length from position 0, and the pieces'
results are merged in order: by one program that computes all of them, or, for a sequence with one new token, by
_merge_split after one program per piece. Both do the same arithmetic, so a token has the same bits either way.

Reference: trunkline_kernels.paged_attention. Source of the paging: vLLM (Kwon et al., SOSP 2023); of packing the heads
of grouped-query attention: FlashAttention-2 (Dao, 2023).
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from trunkline_kernels.gpu.attention_tile import LOG2_E, attend_tile, blocks_at, merge
from trunkline_kernels.gpu.tuned_tilings import TilingKey, tuned
from trunkline_kernels.ragged_batch import KVLayer

MAX_HEAD_DIM = 256
HOPPER_SHARED_MEMORY = 227 << 10  # bytes that one program may use
SPLIT = 512  # tokens of a piece: long enough for merging to cost little, short enough for few decodes to fill a device


@triton.jit
def _ragged_attention(
    q,  # [num_tokens, num_heads, HEAD_DIM]
    keys, values,  # the pool: [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM]
    out,  # like q
    tiles,  # [num_tiles, 4] int32: see Tiles
    query_starts,  # [num_seqs + 1] int32: rows of q
    context_lens,  # [num_seqs] int32: new tokens included
    rows_of,  # [num_seqs] int32: each sequence's row of block_tables
    block_tables,  # [.., max_blocks] int32
    partial_out,  # [num_slots, num_heads, HEAD_DIM] float32 ← of tiles that are one piece; not used unless SPLIT
    partial_stats,  # [num_slots, num_heads, 2] float32 ← peak (base 2), total
    key_scale, value_scale,  # [1] float32: stored values are multiplied by them; not read unless SCALED
    scale,
    window,
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
    WINDOW: tl.constexpr,
    SCALED: tl.constexpr,
    SPLIT: tl.constexpr,  # tokens of a piece; 0: bits may depend on where a tile begins
):  # fmt: skip
    """Grid: (num_tiles * num_kv_heads); the heads of a tile are adjacent."""
    TILE_TOKENS: tl.constexpr = TILE_ROWS // GROUP
    num_kv_heads = num_heads // GROUP
    kv_head = tl.program_id(0) % num_kv_heads
    tile = tiles + tl.program_id(0) // num_kv_heads * 4
    found = tl.load(tile)
    if found < 0:
        return
    sequence = found.to(tl.int64)
    first = tl.load(tile + 1)
    query_start = tl.load(query_starts + sequence)
    query_len = tl.load(query_starts + sequence + 1) - query_start
    computed = tl.load(context_lens + sequence) - query_len
    last = tl.minimum(first + TILE_TOKENS, query_len)

    rows = tl.arange(0, TILE_ROWS)
    dim = tl.arange(0, PADDED_DIM)
    token = first + rows // GROUP
    # GROUP need not divide TILE_ROWS: the remaining rows are not used.
    known = (token >= 0) & (token < last) & (rows < TILE_TOKENS * GROUP)
    head = kv_head * GROUP + rows % GROUP
    place = ((query_start + token).to(tl.int64) * num_heads + head) * HEAD_DIM
    inside = known[:, None] & (dim < HEAD_DIM)[None, :]
    queries = tl.load(q + place[:, None] + dim[None, :], mask=inside, other=0.0)
    query_positions = tl.where(known, computed + token, -1)
    if SCALED:
        scale = scale * tl.load(key_scale)

    keys += kv_head * HEAD_DIM
    values += kv_head * HEAD_DIM
    table = block_tables + tl.load(rows_of + sequence).to(tl.int64) * table_stride
    end = computed + last
    begin = 0
    if WINDOW:
        begin = tl.maximum(computed + first - window + 1, 0) // TILE_KEYS * TILE_KEYS
    acc = tl.zeros([TILE_ROWS, PADDED_DIM], tl.float32)
    peak = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    slot = tl.load(tile + 3)
    if SPLIT:
        piece = begin // SPLIT
        last_piece = (end - 1) // SPLIT
        if slot >= 0:
            piece = tl.load(tile + 2)
            last_piece = piece
        for number in tl.range(piece, last_piece + 1):
            piece_acc = tl.zeros([TILE_ROWS, PADDED_DIM], tl.float32)
            piece_peak = tl.full([TILE_ROWS], float("-inf"), tl.float32)
            piece_total = tl.zeros([TILE_ROWS], tl.float32)
            # All tiles of keys are masked, so that the start of a tile of queries makes no difference.
            blocks = blocks_at(table, tl.maximum(begin, number * SPLIT), end, BLOCK_SIZE, TILE_KEYS)
            for start in tl.range(tl.maximum(begin, number * SPLIT), tl.minimum(end, (number + 1) * SPLIT), TILE_KEYS):
                piece_acc, piece_peak, piece_total = attend_tile(
                    queries, piece_acc, piece_peak, piece_total, keys, values, blocks, start, end, query_positions,
                    scale, window, block_stride, slot_stride, True, WINDOW, BLOCK_SIZE, HEAD_DIM, PADDED_DIM,
                    TILE_KEYS,
                )  # fmt: skip
                blocks = blocks_at(table, start + TILE_KEYS, end, BLOCK_SIZE, TILE_KEYS)
            acc, peak, total = merge(
                acc, peak[:, None], total[:, None], piece_acc, piece_peak[:, None], piece_total[:, None]
            )
            peak = tl.reshape(peak, [TILE_ROWS])
            total = tl.reshape(total, [TILE_ROWS])
    else:
        if not WINDOW:
            # Tiles of keys that every query sees completely need no mask.
            seen = (computed + first + 1) // TILE_KEYS * TILE_KEYS
            blocks = blocks_at(table, begin, end, BLOCK_SIZE, TILE_KEYS)
            for start in tl.range(begin, seen, TILE_KEYS):
                acc, peak, total = attend_tile(
                    queries, acc, peak, total, keys, values, blocks, start, end, query_positions, scale, window,
                    block_stride, slot_stride, False, False, BLOCK_SIZE, HEAD_DIM, PADDED_DIM, TILE_KEYS,
                )  # fmt: skip
                blocks = blocks_at(table, start + TILE_KEYS, end, BLOCK_SIZE, TILE_KEYS)
            begin = seen
        blocks = blocks_at(table, begin, end, BLOCK_SIZE, TILE_KEYS)
        for start in tl.range(begin, end, TILE_KEYS):
            acc, peak, total = attend_tile(
                queries, acc, peak, total, keys, values, blocks, start, end, query_positions, scale, window,
                block_stride, slot_stride, True, WINDOW, BLOCK_SIZE, HEAD_DIM, PADDED_DIM, TILE_KEYS,
            )  # fmt: skip
            blocks = blocks_at(table, start + TILE_KEYS, end, BLOCK_SIZE, TILE_KEYS)
    if SPLIT and slot >= 0:
        # One new token: its heads are the only known rows.
        place = slot.to(tl.int64) * num_heads + head
        tl.store(partial_out + place[:, None] * HEAD_DIM + dim[None, :], acc, mask=inside)
        tl.store(partial_stats + place * 2, peak, mask=known)
        tl.store(partial_stats + place * 2 + 1, total, mask=known)
    else:
        result = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # rows without a query have a total of 0
        if SCALED:
            result = result * tl.load(value_scale)
        tl.store(out + place[:, None] + dim[None, :], result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _merge_split(
    out,  # [num_tokens, num_heads, HEAD_DIM] ← rows of sequences whose contexts were split into pieces
    cut,  # [num_cut, 3] int32: row of out, slot of its first piece, number of pieces; 0 pieces: padding
    partial_out, partial_stats,  # as above
    value_scale,  # [1] float32; not read unless SCALED
    num_heads,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """Merges the pieces of each context in order. Grid: (num_heads, num_cut)."""
    head = tl.program_id(0)
    entry = cut + tl.program_id(1) * 3
    count = tl.load(entry + 2)
    if count == 0:
        return
    dim = tl.arange(0, PADDED_DIM)
    inside = dim < HEAD_DIM
    acc = tl.zeros([PADDED_DIM], tl.float32)
    peak = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    place = tl.load(entry + 1).to(tl.int64) * num_heads + head
    for _ in tl.range(0, count):
        piece = tl.load(partial_out + place * HEAD_DIM + dim, mask=inside, other=0.0)
        acc, peak, total = merge(
            acc, peak, total, piece, tl.load(partial_stats + place * 2), tl.load(partial_stats + place * 2 + 1)
        )
        place += num_heads
    result = acc / tl.where(total == 0.0, 1.0, total)
    if SCALED:
        result = result * tl.load(value_scale)
    place = (tl.load(entry).to(tl.int64) * num_heads + head) * HEAD_DIM
    tl.store(out + place + dim, result.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class RaggedTiling:
    """The sizes of tiles, and the resources of a program that computes one."""

    rows: int  # of queries
    keys: int
    warps: int
    stages: int  # of the pipeline of loads

    def tokens(self, group: int) -> int:
        """Returns the number of new tokens of a tile, for this many query heads per KV head."""
        return self.rows // group


def tiling_for(
    *,
    head_dim: int,
    group: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    shared_memory: int,
    split: bool = False,
    device: str = "",
) -> RaggedTiling:
    """Returns the tiling that was measured to be the fastest on this device, else tiles that fill a chip's tensor cores
    and fit the shared memory of a program (227 KiB on H100 and B200, 163 on A100, 99 on L4, 64 on MI300X).

    group: query heads of a KV head; shared_memory: bytes per program; device: its name
    split: for ragged_attention(split=…), which holds two results at once and computes decodes with the same tiles;
    measured tilings are not used for it
    Raises ValueError if head_dim is more than MAX_HEAD_DIM, or the table of tilings is damaged.
    """
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim {head_dim} is more than the {MAX_HEAD_DIM} that the attention kernels support")
    padded = max(16, triton.next_power_of_2(head_dim))
    key = TilingKey.of(
        "ragged_attention", device=device, head_dim=head_dim, group=group, dtype=dtype, kv_dtype=kv_dtype
    )
    if not split and (found := tuned(key)):
        return RaggedTiling(**found)
    if dtype == torch.float32:
        return RaggedTiling(max(32, triton.next_power_of_2(group)), 32, 4, 1)
    # Registers are scarce before Hopper, whose tensor cores are the first to read operands from shared memory, and
    # where two results are held at once.
    hopper = shared_memory >= HOPPER_SHARED_MEMORY
    rows = max(128 if hopper and padded <= 128 and not split else 64, triton.next_power_of_2(group))
    # Shared memory holds the queries, and keys and values of each stage of the pipeline. With three stages, the next
    # tile is loaded while one is computed.
    for keys, stages in ((64, 3), (32, 3), (32, 2), (32, 1)):
        if keys > 32 and (padded > 128 or not hopper):
            continue
        if (rows + 2 * keys * stages) * padded * dtype.itemsize <= shared_memory:
            return RaggedTiling(rows, keys, 8 if rows * padded >= 128 * 64 else 4, stages)
    return RaggedTiling(max(16, triton.next_power_of_2(group)), 16, 4, 1)


class Tiles(NamedTuple):
    """The tiles that programs of ragged_attention compute."""

    # [num_tiles, 4]: sequence (-1: padding), first new token, piece, slot; piece and slot are -1 for a whole context
    tiles: NDArray[np.int32]
    cut: NDArray[np.int32]  # [num_cut, 3], of contexts split into pieces: row of q, first slot, number of pieces
    num_slots: int  # pieces in all


def tiles_of(query_lens: NDArray[np.int32], tile_tokens: int) -> Tiles:
    """Returns the tiles of sequences. query_lens: [num_seqs], new tokens of each; tile_tokens: new tokens of a tile

    Tiles at the end of a sequence come first: they attend to the most keys, and the longest work should start first.
    """
    return Tiles(_tiles(query_lens, tile_tokens, np.zeros_like(query_lens)), np.zeros((0, 3), np.int32), 0)


def split_tiles_of(
    query_lens: NDArray[np.int32], context_lens: NDArray[np.int32], tile_tokens: int, split: int
) -> Tiles:
    """Returns tiles for ragged_attention(split=…). Tiles begin at positions that are multiples of `tile_tokens`, so a
    sequence's first tile may begin before its first new token. A token is thus in the same row of its tile for any
    chunking of its prompt. A sequence with one new token has a tile for each piece of its context, if it has several.

    query_lens, context_lens: [num_seqs]; split: tokens of a piece
    """
    tiles = _tiles(query_lens, tile_tokens, (context_lens - query_lens) % tile_tokens)
    counts = np.where(query_lens == 1, -(-context_lens // split), 1)
    cut = np.flatnonzero(counts > 1)
    if not len(cut):
        return Tiles(tiles, np.zeros((0, 3), np.int32), 0)
    whole = tiles[counts[tiles[:, 0]] == 1]
    counts = counts[cut]
    ends = np.cumsum(counts)
    slots = np.arange(ends[-1])
    firsts = np.repeat(ends - counts, counts)
    before = -((context_lens[cut] - 1) % tile_tokens)
    pieces = [np.repeat(cut, counts), np.repeat(before, counts), slots - firsts, slots]
    rows = (np.cumsum(query_lens) - query_lens)[cut]
    return Tiles(
        np.concatenate([np.stack(pieces, axis=1), whole]).astype(np.int32),
        np.stack([rows, ends - counts, counts], axis=1).astype(np.int32),
        int(ends[-1]),
    )


def _tiles(query_lens: NDArray[np.int32], tile_tokens: int, before: NDArray[np.int32]) -> NDArray[np.int32]:
    """before: [num_seqs], tokens of each sequence's first tile that precede its first new token"""
    counts = np.where(query_lens > 0, -(-(query_lens + before) // tile_tokens), 0)
    sequences = np.repeat(np.arange(len(query_lens), dtype=np.int32), counts)
    within = np.arange(len(sequences), dtype=np.int32) - np.repeat(np.cumsum(counts) - counts, counts)
    nothing = np.full(len(sequences), -1, np.int32)
    tiles = np.stack([sequences, within * tile_tokens - before[sequences], nothing, nothing], axis=1)
    return tiles.astype(np.int32)[::-1].copy()


@dataclass(frozen=True, slots=True)
class Pieces:
    """The contexts that are split into pieces, and room for the pieces' results."""

    cut: Tensor  # [num_cut, 3] int32: see Tiles
    partial_out: Tensor  # [num_slots, num_heads, head_dim] float32
    partial_stats: Tensor  # [num_slots, num_heads, 2] float32

    @classmethod
    def allocate(cls, num_slots: int, num_heads: int, head_dim: int, cut: Tensor) -> "Pieces":
        """Allocates room for `num_slots` pieces on the device of `cut`, [num_cut, 3] int32."""

        def room(width: int) -> Tensor:
            return torch.empty(num_slots, num_heads, width, dtype=torch.float32, device=cut.device)

        return cls(cut, room(head_dim), room(2))

    @staticmethod
    def num_bytes(num_slots: int, num_heads: int, head_dim: int) -> int:
        """Returns the bytes that allocate() takes."""
        return num_slots * num_heads * (head_dim + 2) * torch.float32.itemsize


def ragged_attention(
    q: Tensor,
    kv: KVLayer,
    out: Tensor,
    *,
    tiles: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    rows: Tensor,
    block_tables: Tensor,
    tiling: RaggedTiling,
    scale: float,
    window: int | None = None,
    split: int = 0,
    pieces: Pieces | None = None,
) -> None:
    """Computes causal attention of the new tokens in `tiles`, and writes it to `out`. The pool must already have the
    new tokens' keys and values.

    q, out: [num_tokens, num_heads, head_dim]
    tiles: [num_tiles, 4] int32, see Tiles; query_starts: [num_seqs + 1] int32; context_lens: [num_seqs] int32
    rows: [num_seqs] int32, rows of block_tables: [.., max_blocks] int32
    window: a query sees this many last positions, including its own; None: all
    split: tokens of a piece: contexts are split, and a token's bits do not depend on the rest of the batch; tiles must
    come from split_tiles_of. 0: contexts are not split
    pieces: of contexts with several pieces; may be None if there are none
    """
    _, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = kv.keys.shape
    if not len(tiles):
        return
    assert split % tiling.keys == 0, f"pieces of {split} tokens are not a multiple of a tile's {tiling.keys}"
    scaled = kv.key_scale is not None
    padded_dim = max(16, triton.next_power_of_2(head_dim))
    value_scale = kv.value_scale if scaled else q
    # The two kernels must round alike, so the compiler must not fuse products and sums in one of them only.
    fused = {"enable_fp_fusion": False} if split else {}
    # The grid has one dimension, because many long contexts can have more pieces than a second dimension allows.
    _ragged_attention[(len(tiles) * num_kv_heads,)](
        q, kv.keys, kv.values, out, tiles, query_starts, context_lens, rows, block_tables,
        pieces.partial_out if pieces else q, pieces.partial_stats if pieces else q,
        kv.key_scale if scaled else q, value_scale,
        scale * LOG2_E.value, window or 0,
        block_tables.stride(0), kv.block_stride, num_kv_heads * head_dim, num_heads,
        num_heads // num_kv_heads, head_dim, padded_dim, block_size,
        tiling.rows, tiling.keys, window is not None, scaled, split,
        num_warps=tiling.warps, num_stages=tiling.stages, **fused,
    )  # fmt: skip
    if pieces is not None and len(pieces.cut):
        _merge_split[(num_heads, len(pieces.cut))](
            out, pieces.cut, pieces.partial_out, pieces.partial_stats, value_scale, num_heads, head_dim, padded_dim,
            scaled, num_warps=1, **fused,
        )  # fmt: skip
