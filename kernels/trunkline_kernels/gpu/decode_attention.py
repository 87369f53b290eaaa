"""Attention of sequences with one new token each: each context is cut into pieces, and the pieces' results are merged.

One decode reads its whole context and computes little, so the device is only busy when many programs read at once. How
long a piece is, is decided on the device from the contexts of the step: few and long contexts are cut into many
pieces, many short ones are not cut at all. A captured graph therefore serves any contexts.

Twin: trunkline_kernels.paged_attention. Source: Flash-Decoding (Dao, Haziza, Massa, Sizov, 2023); the merge is that of
online softmax (Milakov and Gimelshein, 2018).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from trunkline_kernels.gpu.attention_tile import LOG2_E, attend_tile
from trunkline_kernels.ragged_batch import KVLayer

SHORTEST_PIECE = 256  # tokens: below, a program's start and the merge cost more than the reading


@triton.jit
def _plan_pieces(
    context_lens,  # [num_seqs] int32; 0: a row of padding
    piece_sequences,  # [num_seqs + extra] int32 ← the sequence of each piece; -1: there is no such piece
    piece_starts,  # [num_seqs + 1] int32 ← number of each sequence's first piece
    piece_len,  # [1] int32 ← tokens
    num_seqs,
    num_slots,  # length of piece_sequences
    extra,
    SHORTEST: tl.constexpr,
    FIXED: tl.constexpr,  # pieces of SHORTEST tokens, whatever the step holds
    PADDED_SEQS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Grid: (num_seqs + 1). Each program places the pieces of its sequence; the last one clears what is left over."""
    sequence = tl.program_id(0)
    index = tl.arange(0, PADDED_SEQS)
    lens = tl.load(context_lens + index, mask=index < num_seqs, other=0)
    if FIXED:
        length = SHORTEST
    else:
        # ceil(len / length) summed over the sequences is at most num_seqs + total / length: no more than the slots.
        wanted = (tl.sum(lens) + extra - 1) // extra
        length = tl.maximum((wanted + SHORTEST - 1) // SHORTEST * SHORTEST, SHORTEST)
    counts = (lens + length - 1) // length
    before = tl.sum(tl.where(index < sequence, counts, 0))
    own = tl.sum(tl.where(index == sequence, counts, 0))
    tl.store(piece_starts + sequence, before)
    if sequence == num_seqs:
        tl.store(piece_len, length)
        own = num_slots - before
    for start in tl.range(0, own, CHUNK):
        at = start + tl.arange(0, CHUNK)
        tl.store(piece_sequences + before + at, tl.where(sequence == num_seqs, -1, sequence), mask=at < own)


@triton.jit
def _attend_pieces(
    q,  # [num_seqs, num_heads, HEAD_DIM]
    keys, values,  # the pool: [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM]
    out,  # like q ← of sequences with one piece
    partial_out,  # [num_pieces, num_heads, HEAD_DIM] float32 ← of the others, not yet divided by the total
    partial_stats,  # [num_pieces, num_heads, 2] float32 ← peak (base 2), total
    context_lens,  # [num_seqs] int32
    block_tables,  # [num_seqs, max_blocks] int32
    piece_sequences, piece_starts, piece_len,  # of _plan_pieces
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
    ALWAYS_MASKED: tl.constexpr,
):  # fmt: skip
    """Grid: (num_kv_heads, num_pieces)."""
    kv_head = tl.program_id(0)
    piece = tl.program_id(1)
    found = tl.load(piece_sequences + piece)
    if found < 0:
        return
    sequence = found.to(tl.int64)
    context_len = tl.load(context_lens + sequence)
    first_piece = tl.load(piece_starts + sequence)
    num_pieces = tl.load(piece_starts + sequence + 1) - first_piece
    length = tl.load(piece_len)
    begin = (piece - first_piece) * length
    end = tl.minimum(begin + length, context_len)

    rows = tl.arange(0, TILE_ROWS)
    dim = tl.arange(0, PADDED_DIM)
    known = rows < GROUP
    head = kv_head * GROUP + rows
    inside = known[:, None] & (dim < HEAD_DIM)[None, :]
    place = (sequence * num_heads + head) * HEAD_DIM
    queries = tl.load(q + place[:, None] + dim[None, :], mask=inside, other=0.0)
    query_positions = tl.where(known, context_len - 1, -1)
    if SCALED:
        scale = scale * tl.load(key_scale)

    keys += kv_head * HEAD_DIM
    values += kv_head * HEAD_DIM
    table = block_tables + sequence * table_stride
    acc = tl.zeros([TILE_ROWS, PADDED_DIM], tl.float32)
    peak = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    if WINDOW:
        # Pieces are counted from position 0, so that the same ones exist with and without a window.
        begin = tl.maximum(begin, tl.maximum(context_len - window, 0) // TILE_KEYS * TILE_KEYS)
    elif not ALWAYS_MASKED:
        whole = begin + tl.maximum(end - begin, 0) // TILE_KEYS * TILE_KEYS
        for start in tl.range(begin, whole, TILE_KEYS):
            acc, peak, total = attend_tile(
                queries, acc, peak, total, keys, values, table, start, end, query_positions, scale, soft_cap, window,
                slot_stride, False, False, SOFT_CAP, BLOCK_SIZE, HEAD_DIM, PADDED_DIM, TILE_KEYS,
            )  # fmt: skip
        begin = whole
    for start in tl.range(begin, end, TILE_KEYS):
        acc, peak, total = attend_tile(
            queries, acc, peak, total, keys, values, table, start, end, query_positions, scale, soft_cap, window,
            slot_stride, True, WINDOW, SOFT_CAP, BLOCK_SIZE, HEAD_DIM, PADDED_DIM, TILE_KEYS,
        )  # fmt: skip
    if num_pieces == 1:
        result = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # rows that are nobody's have seen nothing
        if SCALED:
            result = result * tl.load(value_scale)
        tl.store(out + place[:, None] + dim[None, :], result.to(out.dtype.element_ty), mask=inside)
    else:
        place = piece.to(tl.int64) * num_heads + head
        tl.store(partial_out + place[:, None] * HEAD_DIM + dim[None, :], acc, mask=inside)
        tl.store(partial_stats + place * 2, peak, mask=known)
        tl.store(partial_stats + place * 2 + 1, total, mask=known)


@triton.jit
def _merge_pieces(
    out,  # [num_seqs, num_heads, HEAD_DIM] ← of sequences with several pieces
    partial_out, partial_stats, piece_starts,  # as above
    value_scale,  # [1] float32; not read unless SCALED
    num_heads,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """Grid: (num_heads, num_seqs)."""
    head = tl.program_id(0)
    sequence = tl.program_id(1)
    first = tl.load(piece_starts + sequence)
    last = tl.load(piece_starts + sequence + 1)
    if last - first <= 1:
        return
    dim = tl.arange(0, PADDED_DIM)
    inside = dim < HEAD_DIM
    acc = tl.zeros([PADDED_DIM], tl.float32)
    peak = float("-inf")
    total = 0.0
    place = first.to(tl.int64) * num_heads + head
    for _ in tl.range(first, last):
        piece_peak = tl.load(partial_stats + place * 2)
        piece_total = tl.load(partial_stats + place * 2 + 1)
        raised = tl.maximum(peak, piece_peak)
        # A piece that lies before the window has seen nothing.
        anchor = tl.where(raised == float("-inf"), 0.0, raised)
        decay = tl.exp2(peak - anchor)
        weight = tl.exp2(piece_peak - anchor)
        values = tl.load(partial_out + place * HEAD_DIM + dim, mask=inside, other=0.0)
        acc = acc * decay + values * weight
        total = total * decay + piece_total * weight
        peak = raised
        place += num_heads
    result = acc / total
    if SCALED:
        result = result * tl.load(value_scale)
    place = (sequence.to(tl.int64) * num_heads + head) * HEAD_DIM
    tl.store(out + place + dim, result.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """How a step's contexts are cut, the same for all layers, and room for the pieces' results."""

    piece_sequences: Tensor  # [num_pieces] int32
    piece_starts: Tensor  # [max_seqs + 1] int32
    piece_len: Tensor  # [1] int32
    partial_out: Tensor  # [num_pieces, num_heads, head_dim] float32
    partial_stats: Tensor  # [num_pieces, num_heads, 2] float32
    extra: int  # pieces that there may be beyond one per sequence
    fixed_len: int | None

    @classmethod
    def allocate(
        cls,
        *,
        max_seqs: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        num_multiprocessors: int,
        device: torch.device,
        fixed_len: int | None = None,
        max_context: int = 0,
    ) -> "DecodePlan":
        """Room for steps of up to `max_seqs` sequences.

        fixed_len: pieces have this many tokens whatever else runs, for --deterministic; contexts are then at most
        `max_context`. None: as many pieces as keep the device busy.
        """
        if fixed_len is None:
            extra = max(1, -(-4 * num_multiprocessors // num_kv_heads))
            pieces = max_seqs + extra
        else:
            extra, pieces = 1, max_seqs * -(-max_context // fixed_len)
        return cls(
            torch.empty(pieces, dtype=torch.int32, device=device),
            torch.empty(max_seqs + 1, dtype=torch.int32, device=device),
            torch.empty(1, dtype=torch.int32, device=device),
            torch.empty(pieces, num_heads, head_dim, dtype=torch.float32, device=device),
            torch.empty(pieces, num_heads, 2, dtype=torch.float32, device=device),
            extra,
            fixed_len,
        )

    def num_pieces(self, num_seqs: int) -> int:
        """Most pieces of a step with this many sequences."""
        if self.fixed_len is None:
            return num_seqs + self.extra
        return num_seqs * (len(self.piece_sequences) // (len(self.piece_starts) - 1))

    def update(self, context_lens: Tensor) -> None:
        """Cuts the contexts of a step, on the device.  context_lens: [num_seqs] int32; 0: a row of padding"""
        num_seqs = len(context_lens)
        fixed = self.fixed_len is not None
        _plan_pieces[(num_seqs + 1,)](
            context_lens, self.piece_sequences, self.piece_starts, self.piece_len, num_seqs,
            self.num_pieces(num_seqs), self.extra, self.fixed_len or SHORTEST_PIECE, fixed,
            triton.next_power_of_2(num_seqs), 64, num_warps=1,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class DecodeTiling:
    """Keys that a program handles at once, warps, and stages of its pipeline of loads."""

    keys: int
    warps: int
    stages: int


def decode_tiling_for(*, head_dim: int, capability: tuple[int, int], dtype: torch.dtype) -> DecodeTiling:
    """Tiles that keep enough loads in flight."""
    if head_dim > 256:
        raise ValueError(f"head_dim {head_dim} is more than the 256 that the attention kernels support")
    if dtype == torch.float32:
        return DecodeTiling(32, 4, 1)
    return DecodeTiling(64 if head_dim <= 128 else 32, 4, 3 if capability[0] >= 9 else 2)


def decode_attention(
    q: Tensor,
    kv: KVLayer,
    out: Tensor,
    *,
    context_lens: Tensor,
    block_tables: Tensor,
    plan: DecodePlan,
    tiling: DecodeTiling,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> None:
    """Attention of one new token of each sequence. Its key and value must be in the pool already, and `plan` updated.

    q, out: [num_seqs, num_heads, head_dim]; rows of sequences without a context are left as they are
    context_lens: [num_seqs] int32; block_tables: [num_seqs, max_blocks] int32
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
    _attend_pieces[(num_kv_heads, plan.num_pieces(num_seqs))](
        q, kv.keys, kv.values, out, plan.partial_out, plan.partial_stats, context_lens, block_tables,
        plan.piece_sequences, plan.piece_starts, plan.piece_len, kv.key_scale if scaled else q, value_scale,
        scale * LOG2_E.value, soft_cap or 0.0, window or 0, block_tables.stride(0), num_kv_heads * head_dim, num_heads,
        group, head_dim, padded_dim, block_size, max(16, triton.next_power_of_2(group)), tiling.keys,
        window is not None, soft_cap is not None, scaled, plan.fixed_len is not None,
        num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    _merge_pieces[(num_heads, num_seqs)](
        out, plan.partial_out, plan.partial_stats, plan.piece_starts, value_scale, num_heads,
        head_dim, padded_dim, scaled, num_warps=1,
    )  # fmt: skip
