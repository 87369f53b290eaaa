"""Attention of sequences with one new token each: the tiles of all contexts are divided evenly among programs, and the
results of contexts that are cut are merged.

One decode reads its whole context and computes little, so the device is only busy when many programs read at once: see
decode_plan. A prefix that several sequences share is read for all of them by shared_prefix, and merged here.

Twin: trunkline_kernels.paged_attention. Source: Flash-Decoding (Dao, Haziza, Massa, Sizov, 2023); the merge is that of
online softmax (Milakov and Gimelshein, 2018).
"""

import triton
import triton.language as tl
from torch import Tensor

from trunkline_kernels.gpu.attention_tile import LOG2_E, attend_tile, blocks_at
from trunkline_kernels.gpu.decode_plan import DecodePlan
from trunkline_kernels.gpu.shared_prefix import SharedPrefixes
from trunkline_kernels.ragged_batch import KVLayer


@triton.jit
def _attend_ranges(
    q,  # [num_seqs, num_heads, HEAD_DIM]
    keys, values,  # the pool: [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM]
    out,  # like q ← of sequences that are not cut
    partial_out,  # [num_pieces, num_heads, HEAD_DIM] float32 ← of the others, not yet divided by the total
    partial_stats,  # [num_pieces, num_heads, 2] float32 ← peak (base 2), total
    context_lens,  # [num_seqs] int32
    rows_of,  # [num_seqs] int32: each sequence's row of block_tables
    block_tables,  # [.., max_blocks] int32
    prefixes,  # [num_seqs, 3] int32: tokens that shared_prefix has seen to, their first slot, their number of pieces
    tile_starts, pieces, ranges,  # of DecodePlan, for this window
    key_scale, value_scale,  # [1] float32; not read unless SCALED
    scale,
    soft_cap,
    window,
    table_stride,
    slot_stride,
    num_heads,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,  # GROUP, up to what a matrix product needs
    TILE_KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """Grid: (num_kv_heads, num_ranges). Programs of neighbouring heads read neighbouring memory at the same time."""
    kv_head = tl.program_id(0)
    number = tl.program_id(1)
    first_sequence = tl.load(ranges + number * 4)
    last_sequence = tl.load(ranges + number * 4 + 1)
    first_tile = tl.load(ranges + number * 4 + 2)
    end_tile = tl.load(ranges + number * 4 + 3)

    rows = tl.arange(0, TILE_ROWS)
    dim = tl.arange(0, PADDED_DIM)
    known = rows < GROUP
    head = kv_head * GROUP + rows
    inside = known[:, None] & (dim < HEAD_DIM)[None, :]
    if SCALED:
        scale = scale * tl.load(key_scale)
    keys += kv_head * HEAD_DIM
    values += kv_head * HEAD_DIM
    nothing = tl.full([], 0, tl.int64)  # so that places of sequences are counted in 64 bits
    for sequence_number in tl.range(first_sequence, last_sequence + 1):
        sequence = nothing + sequence_number
        context_len = tl.load(context_lens + sequence)
        prefix_len = tl.load(prefixes + sequence * 3)
        sequence_tile = tl.load(tile_starts + sequence)
        num_pieces = tl.load(pieces + sequence * 2 + 1)
        seen_from = prefix_len
        if WINDOW:
            seen_from = tl.maximum(context_len - window, 0) // TILE_KEYS * TILE_KEYS
        begin = seen_from + tl.maximum(first_tile - sequence_tile, 0) * TILE_KEYS
        end = tl.minimum(seen_from + (end_tile - sequence_tile) * TILE_KEYS, context_len)
        place = (sequence * num_heads + head) * HEAD_DIM
        queries = tl.load(q + place[:, None] + dim[None, :], mask=inside, other=0.0)
        query_positions = tl.where(known, context_len - 1, -1)
        table = block_tables + tl.load(rows_of + sequence).to(tl.int64) * table_stride
        acc = tl.zeros([TILE_ROWS, PADDED_DIM], tl.float32)
        peak = tl.full([TILE_ROWS], float("-inf"), tl.float32)
        total = tl.zeros([TILE_ROWS], tl.float32)
        if not WINDOW:
            whole = begin + tl.maximum(end - begin, 0) // TILE_KEYS * TILE_KEYS
            blocks = blocks_at(table, begin, end, BLOCK_SIZE, TILE_KEYS)
            for start in tl.range(begin, whole, TILE_KEYS):
                acc, peak, total = attend_tile(
                    queries, acc, peak, total, keys, values, blocks, start, end, query_positions, scale, soft_cap,
                    window, slot_stride, False, False, SOFT_CAP, BLOCK_SIZE, HEAD_DIM, PADDED_DIM, TILE_KEYS,
                )  # fmt: skip
                blocks = blocks_at(table, start + TILE_KEYS, end, BLOCK_SIZE, TILE_KEYS)
            begin = whole
        blocks = blocks_at(table, begin, end, BLOCK_SIZE, TILE_KEYS)
        for start in tl.range(begin, end, TILE_KEYS):
            acc, peak, total = attend_tile(
                queries, acc, peak, total, keys, values, blocks, start, end, query_positions, scale, soft_cap, window,
                slot_stride, True, WINDOW, SOFT_CAP, BLOCK_SIZE, HEAD_DIM, PADDED_DIM, TILE_KEYS,
            )  # fmt: skip
            blocks = blocks_at(table, start + TILE_KEYS, end, BLOCK_SIZE, TILE_KEYS)
        if (num_pieces > 1) | (prefix_len > 0):
            piece = (sequence + number) * num_heads + head
            # A sequence without tiles is between others, and has no piece.
            some = known & (num_pieces > 0)
            tl.store(
                partial_out + piece[:, None] * HEAD_DIM + dim[None, :],
                acc,
                mask=some[:, None] & (dim < HEAD_DIM)[None, :],
            )
            tl.store(partial_stats + piece * 2, peak, mask=some)
            tl.store(partial_stats + piece * 2 + 1, total, mask=some)
        elif num_pieces == 1:
            result = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # rows that are nobody's have seen nothing
            if SCALED:
                result = result * tl.load(value_scale)
            tl.store(out + place[:, None] + dim[None, :], result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _merged(
    acc, peak, total,
    partial_out, partial_stats,
    place,  # of the first result, in rows of partial_out
    stride,  # rows from one result to the next
    count,
    dim, inside,
    HEAD_DIM: tl.constexpr,
    TILE_PIECES: tl.constexpr,
):  # fmt: skip
    """A running result with `count` others taken in, several of them at a time: none waits for the one before."""
    number = tl.arange(0, TILE_PIECES)
    for start in tl.range(0, count, TILE_PIECES):
        there = start + number < count
        rows = place + (start + number) * stride
        values = tl.load(
            partial_out + rows[:, None] * HEAD_DIM + dim[None, :], mask=there[:, None] & inside[None, :], other=0.0
        )
        peaks = tl.load(partial_stats + rows * 2, mask=there, other=float("-inf"))
        totals = tl.load(partial_stats + rows * 2 + 1, mask=there, other=0.0)
        raised = tl.maximum(peak, tl.max(peaks, axis=0))
        # What lies before a window, or before anything was seen, has no anchor: -inf minus -inf is no number.
        anchor = tl.where(raised == float("-inf"), 0.0, raised)
        decay = tl.exp2(peak - anchor)
        weights = tl.exp2(peaks - anchor)
        acc = acc * decay + tl.sum(values * weights[:, None], axis=0)
        total = total * decay + tl.sum(totals * weights, axis=0)
        peak = raised
    return acc, peak, total


@triton.jit
def _merge_pieces(
    out,  # [num_seqs, num_heads, HEAD_DIM] ← of sequences with several pieces, or with a shared prefix
    partial_out, partial_stats, pieces, ranges,  # as above
    prefixes, prefix_tiles, prefix_out, prefix_stats,  # of SharedPrefixes
    value_scale,  # [1] float32; not read unless SCALED
    num_heads,
    PREFIX_ROWS: tl.constexpr,  # sequences of a tile of a shared prefix
    SHARED: tl.constexpr,  # there may be shared prefixes
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    SCALED: tl.constexpr,
    TILE_PIECES: tl.constexpr,
):  # fmt: skip
    """Grid: (num_heads, num_seqs) if SHARED, else (num_heads, num_ranges - 1): the ends of ranges cut fewer sequences
    than there may be."""
    head = tl.program_id(0)
    number = tl.program_id(1)
    if SHARED:
        sequence = number
        shared = tl.load(prefixes + sequence * 3 + 2)
    else:
        sequence = tl.load(ranges + (number + 1) * 4)
        shared = 0
    first_range = tl.load(pieces + sequence * 2)
    num_pieces = tl.load(pieces + sequence * 2 + 1)
    if SHARED:
        if (num_pieces <= 1) & (shared == 0):
            return
    else:
        # A sequence may go on over several ranges: the program of the first end that cuts it merges it.
        if (num_pieces <= 1) | (first_range != number):
            return
    dim = tl.arange(0, PADDED_DIM)
    inside = dim < HEAD_DIM
    acc = tl.zeros([PADDED_DIM], tl.float32)
    peak = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    if SHARED and shared > 0:
        slot = tl.load(prefixes + sequence * 3 + 1).to(tl.int64)
        member = slot * PREFIX_ROWS + sequence - tl.load(prefix_tiles + slot * 5 + 1)
        acc, peak, total = _merged(
            acc, peak, total, prefix_out, prefix_stats, member * num_heads + head, PREFIX_ROWS * num_heads, shared,
            dim, inside, HEAD_DIM, TILE_PIECES,
        )  # fmt: skip
    acc, peak, total = _merged(
        acc, peak, total, partial_out, partial_stats, (sequence + first_range).to(tl.int64) * num_heads + head,
        num_heads, num_pieces, dim, inside, HEAD_DIM, TILE_PIECES,
    )  # fmt: skip
    result = acc / total
    if SCALED:
        result = result * tl.load(value_scale)
    place = (sequence.to(tl.int64) * num_heads + head) * HEAD_DIM
    tl.store(out + place + dim, result.to(out.dtype.element_ty), mask=inside)


def decode_attention(
    q: Tensor,
    kv: KVLayer,
    out: Tensor,
    *,
    context_lens: Tensor,
    rows: Tensor,
    block_tables: Tensor,
    plan: DecodePlan,
    prefixes: SharedPrefixes,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> None:
    """Attention of one new token of each sequence. Its key and value must be in the pool already, and `plan` updated.

    q, out: [num_seqs, num_heads, head_dim]; rows of sequences without a context are left as they are
    context_lens: [num_seqs] int32; rows: [num_seqs] int32, of block_tables: [.., max_blocks] int32
    prefixes: what shared_prefix has seen to; with a window, nothing
    window, soft_cap: as in ragged_attention
    """
    num_seqs, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = kv.keys.shape
    if not num_seqs:
        return
    scaled = kv.key_scale is not None
    group = num_heads // num_kv_heads
    padded_dim = max(16, triton.next_power_of_2(head_dim))
    value_scale = kv.value_scale if scaled else q
    tiling, division = plan.tiling, plan.divisions[window]
    _attend_ranges[(num_kv_heads, plan.num_ranges)](
        q, kv.keys, kv.values, out, plan.partial_out, plan.partial_stats, context_lens, rows, block_tables,
        prefixes.of_sequence, division.tile_starts, division.pieces, division.ranges,
        kv.key_scale if scaled else q, value_scale, scale * LOG2_E.value, soft_cap or 0.0, window or 0,
        block_tables.stride(0), num_kv_heads * head_dim, num_heads,
        group, head_dim, padded_dim, block_size, max(16, triton.next_power_of_2(group)), tiling.keys,
        window is not None, soft_cap is not None, scaled,
        num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    shared = len(prefixes.tiles) > 0
    if shared or plan.num_ranges > 1:
        _merge_pieces[(num_heads, num_seqs if shared else plan.num_ranges - 1)](
            out, plan.partial_out, plan.partial_stats, division.pieces, division.ranges,
            prefixes.of_sequence, prefixes.tiles, prefixes.room.partial_out, prefixes.room.partial_stats, value_scale,
            num_heads, prefixes.room.partial_out.shape[1], shared, head_dim, padded_dim, scaled, 8, num_warps=1,
        )  # fmt: skip
