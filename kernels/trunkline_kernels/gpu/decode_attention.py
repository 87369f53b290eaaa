"""Attention of sequences with one new token each. The tiles of all contexts are divided evenly among programs. If a
context is divided, the last program to finish a piece of it merges the results.

A decode reads its whole context and computes little, so the device is busy only if many programs read at once: see
decode_plan. shared_prefix reads a prefix that several sequences share once for all, and its results are merged here.

Reference: trunkline_kernels.paged_attention. Sources: Flash-Decoding (Dao, Haziza, Massa, Sizov, 2023); online softmax
(Milakov and Gimelshein, 2018), for the merge; stream-K's fix-up (Osama et al., 2023), for merging by the last arrival.
"""

import triton
import triton.language as tl
from torch import Tensor

from trunkline_kernels.gpu.attention_tile import LOG2_E, attend_tile, blocks_at
from trunkline_kernels.gpu.decode_plan import DecodePlan
from trunkline_kernels.gpu.dependent_launch import launch_options, wait_for_inputs
from trunkline_kernels.gpu.shared_prefix import SharedPrefixes
from trunkline_kernels.ragged_batch import KVLayer

MERGED_AT_ONCE = 16  # pieces times heads that a program merges at a time: more would need too many registers


@triton.jit
def _taken_in(
    acc, peak, total,  # [HEADS, PADDED_DIM], [HEADS], [HEADS]
    partial_out, partial_stats,
    place,  # of the first result, in rows of partial_out
    stride,  # rows from one result to the next
    count,
    head, known,  # [HEADS]
    dim,
    HEAD_DIM: tl.constexpr,
    TILE_PIECES: tl.constexpr,
):  # fmt: skip
    """Merges `count` results into a running result, several at a time, so that none waits for the one before.

    → acc, peak, total
    """
    number = tl.arange(0, TILE_PIECES)
    for start in tl.range(0, count, TILE_PIECES):
        there = (start + number < count)[:, None] & known[None, :]
        rows = place + (start + number)[:, None] * stride + head[None, :]
        peaks = tl.load(partial_stats + rows * 2, mask=there, other=float("-inf"))
        totals = tl.load(partial_stats + rows * 2 + 1, mask=there, other=0.0)
        values = tl.load(
            partial_out + rows[:, :, None] * HEAD_DIM + dim[None, None, :],
            mask=there[:, :, None] & (dim < HEAD_DIM)[None, None, :],
            other=0.0,
        )
        raised = tl.maximum(peak, tl.max(peaks, axis=0))
        # A result without visible keys has a peak of -inf; subtracting 0 instead avoids -inf minus -inf, which is NaN.
        anchor = tl.where(raised == float("-inf"), 0.0, raised)
        decay = tl.exp2(peak - anchor)
        weights = tl.exp2(peaks - anchor[None, :])
        acc = acc * decay[:, None] + tl.sum(values * weights[:, :, None], axis=0)
        total = total * decay + tl.sum(totals * weights, axis=0)
        peak = raised
    return acc, peak, total


@triton.jit
def _merge(
    out, partial_out, partial_stats,
    prefixes, prefix_tiles, prefix_out, prefix_stats,
    value_scale,
    sequence, first_range, num_pieces,
    kv_head, num_heads,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    TILE_PIECES: tl.constexpr,
    PREFIX_ROWS: tl.constexpr,
    SCALED: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    """Merges all pieces of one sequence and one KV head, those of its shared prefix first, and writes the result. The
    order is fixed, so that the result does not depend on the program that merges."""
    dim = tl.arange(0, PADDED_DIM)
    head = tl.arange(0, HEADS)
    known = head < GROUP
    head += kv_head * GROUP
    acc = tl.zeros([HEADS, PADDED_DIM], tl.float32)
    peak = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    if SHARED:
        slot = tl.load(prefixes + sequence * 3 + 1).to(tl.int64)
        parts = tl.load(prefixes + sequence * 3 + 2)
        member = slot * PREFIX_ROWS
        if parts > 0:
            member += sequence - tl.load(prefix_tiles + slot * 5 + 1)
        acc, peak, total = _taken_in(
            acc, peak, total, prefix_out, prefix_stats, member * num_heads, PREFIX_ROWS * num_heads, parts, head,
            known, dim, HEAD_DIM, TILE_PIECES,
        )  # fmt: skip
    acc, peak, total = _taken_in(
        acc, peak, total, partial_out, partial_stats, (sequence + first_range) * num_heads, num_heads, num_pieces,
        head, known, dim, HEAD_DIM, TILE_PIECES,
    )  # fmt: skip
    result = acc / tl.where(known, total, 1.0)[:, None]
    if SCALED:
        result = result * tl.load(value_scale)
    place = (sequence * num_heads + head) * HEAD_DIM
    inside = known[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(out + place[:, None] + dim[None, :], result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _attend_ranges(
    q,  # [num_seqs, num_heads, HEAD_DIM]
    keys, values,  # the pool: [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM]
    out,  # like q ←
    # Results of pieces, not yet divided by the total: see DecodePlan for the index of a piece.
    partial_out,  # [max_seqs + num_ranges, num_heads, HEAD_DIM] float32 ←
    partial_stats,  # [max_seqs + num_ranges, num_heads, 2] float32 ← peak (base 2), total
    arrivals,  # [num_seqs, num_kv_heads] int32: finished pieces; zero before and after
    context_lens,  # [num_seqs] int32
    rows_of,  # [num_seqs] int32: each sequence's row of block_tables
    block_tables,  # [.., max_blocks] int32
    prefixes,  # [num_seqs, 3] int32: tokens of the shared prefix, its first tile, its number of tiles
    prefix_tiles, prefix_out, prefix_stats,  # of SharedPrefixes; not read unless SHARED
    tile_starts, pieces, ranges,  # of DecodePlan, for this window
    key_scale, value_scale,  # [1] float32; not read unless SCALED
    scale,
    window,
    table_stride,
    block_stride,
    slot_stride,
    num_heads,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,  # GROUP, padded to what a matrix product needs
    TILE_KEYS: tl.constexpr,
    HEADS: tl.constexpr,  # GROUP, padded to a power of two
    TILE_PIECES: tl.constexpr,  # pieces merged at a time
    PREFIX_ROWS: tl.constexpr,  # sequences of a tile of a shared prefix
    WINDOW: tl.constexpr,
    SCALED: tl.constexpr,
    SHARED: tl.constexpr,  # there may be shared prefixes
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: (num_kv_heads, num_ranges). Programs of adjacent heads read adjacent memory at the same time."""
    wait_for_inputs(DEPENDENT)
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
    nothing = tl.full([], 0, tl.int64)  # makes the sequence's offsets 64-bit numbers
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
                    queries, acc, peak, total, keys, values, blocks, start, end, query_positions, scale, window,
                    block_stride, slot_stride, False, False, BLOCK_SIZE, HEAD_DIM, PADDED_DIM, TILE_KEYS,
                )  # fmt: skip
                blocks = blocks_at(table, start + TILE_KEYS, end, BLOCK_SIZE, TILE_KEYS)
            begin = whole
        blocks = blocks_at(table, begin, end, BLOCK_SIZE, TILE_KEYS)
        for start in tl.range(begin, end, TILE_KEYS):
            acc, peak, total = attend_tile(
                queries, acc, peak, total, keys, values, blocks, start, end, query_positions, scale, window,
                block_stride, slot_stride, True, WINDOW, BLOCK_SIZE, HEAD_DIM, PADDED_DIM, TILE_KEYS,
            )  # fmt: skip
            blocks = blocks_at(table, start + TILE_KEYS, end, BLOCK_SIZE, TILE_KEYS)
        if (num_pieces > 1) | ((num_pieces == 1) & (prefix_len > 0)):
            piece = (sequence + number) * num_heads + head
            tl.store(partial_out + piece[:, None] * HEAD_DIM + dim[None, :], acc, mask=inside)
            tl.store(partial_stats + piece * 2, peak, mask=known)
            tl.store(partial_stats + piece * 2 + 1, total, mask=known)
        elif num_pieces == 1:
            result = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # rows without a query have a total of 0
            if SCALED:
                result = result * tl.load(value_scale)
            tl.store(out + place[:, None] + dim[None, :], result.to(out.dtype.element_ty), mask=inside)

    # All threads store before one of them counts the pieces, so that the last program sees every piece. Without
    # prefixes, only the first and the last sequence of a range have pieces in other ranges. The merge is separate and
    # reads the range again, so that it takes no registers from the loop above.
    tl.debug_barrier()
    first_sequence = tl.load(ranges + number * 4)
    last_sequence = tl.load(ranges + number * 4 + 1)
    stride = 1 if SHARED else tl.maximum(last_sequence - first_sequence, 1)
    for sequence_number in tl.range(first_sequence, last_sequence + 1, stride):
        sequence = tl.full([], 0, tl.int64) + sequence_number
        num_pieces = tl.load(pieces + sequence * 2 + 1)
        is_cut = num_pieces > 1
        if SHARED:
            is_cut |= (num_pieces == 1) & (tl.load(prefixes + sequence * 3) > 0)
        if is_cut:
            meeting = arrivals + sequence * tl.num_programs(0) + kv_head
            if tl.atomic_add(meeting, 1, sem="acq_rel") == num_pieces - 1:
                tl.store(meeting, 0)  # for the next layer
                _merge(
                    out, partial_out, partial_stats, prefixes, prefix_tiles, prefix_out, prefix_stats, value_scale,
                    sequence, tl.load(pieces + sequence * 2), num_pieces, kv_head, num_heads, GROUP, HEAD_DIM,
                    PADDED_DIM, HEADS, TILE_PIECES, PREFIX_ROWS, SCALED, SHARED,
                )  # fmt: skip


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
    dependent: bool = False,
) -> None:
    """Computes attention of one new token of each sequence, and writes it to `out`. The pool must already have the new
    tokens' keys and values, and `plan` must be updated for these contexts.

    q, out: [num_seqs, num_heads, head_dim]; rows of sequences without a context are not written
    context_lens: [num_seqs] int32; rows: [num_seqs] int32, rows of block_tables: [.., max_blocks] int32
    prefixes: those that shared_prefix has computed; none with a window
    window: as in ragged_attention
    dependent: see dependent_launch
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
    heads = triton.next_power_of_2(group)
    _attend_ranges[(num_kv_heads, plan.num_ranges)](
        q, kv.keys, kv.values, out, plan.partial_out, plan.partial_stats, plan.arrivals, context_lens, rows,
        block_tables, prefixes.of_sequence, prefixes.tiles, prefixes.room.partial_out, prefixes.room.partial_stats,
        division.tile_starts, division.pieces, division.ranges,
        kv.key_scale if scaled else q, value_scale, scale * LOG2_E.value, window or 0,
        block_tables.stride(0), kv.block_stride, num_kv_heads * head_dim, num_heads,
        group, head_dim, padded_dim, block_size, max(16, heads), tiling.keys, heads, max(1, MERGED_AT_ONCE // heads),
        prefixes.room.partial_out.shape[1], window is not None, scaled, len(prefixes.tiles) > 0,
        dependent, **tiling.options(narrow=scaled), **launch_options(dependent),
    )  # fmt: skip
