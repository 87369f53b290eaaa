"""Attention of prefill chunks (and of anything else with new tokens) over paged keys and values.

A program computes one tile: TILE_ROWS query rows of one sequence and one KV head. The query heads that share a KV head
are rows of the same tile, so keys are read once for all of them. The grid holds exactly the tiles that exist: a ragged
batch wastes no program.

Twin: trunkline_kernels.paged_attention. Source of the paging: vLLM (Kwon et al., SOSP 2023); of packing the heads of
grouped-query attention: FlashAttention-2 (Dao, 2023).
"""

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from trunkline_kernels.gpu.attention_tile import LOG2_E, attend_tile
from trunkline_kernels.ragged_batch import KVLayer

MAX_HEAD_DIM = 256
HOPPER_SHARED_MEMORY = 227 << 10  # bytes that one program may use


@triton.jit
def _ragged_attention(
    q,  # [num_tokens, num_heads, HEAD_DIM]
    keys, values,  # the pool: [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM]
    out,  # like q
    tiles,  # [num_tiles, 2] int32: sequence, first of its new tokens (negative: that many of the tile are none)
    query_starts,  # [num_seqs + 1] int32: rows of q
    context_lens,  # [num_seqs] int32: new tokens included
    block_tables,  # [num_seqs, max_blocks] int32
    key_scale, value_scale,  # [1] float32: what is stored is multiplied by them; not read unless SCALED
    scale,
    soft_cap,
    window,
    table_stride,
    slot_stride,
    num_heads,
    GROUP: tl.constexpr,  # query heads of a KV head
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SCALED: tl.constexpr,
    ALWAYS_MASKED: tl.constexpr,  # one way for all tiles: bits do not depend on where a tile of queries begins
):  # fmt: skip
    """Grid: (num_kv_heads, num_tiles)."""
    TILE_TOKENS: tl.constexpr = TILE_ROWS // GROUP
    kv_head = tl.program_id(0)
    sequence = tl.load(tiles + tl.program_id(1) * 2).to(tl.int64)
    first = tl.load(tiles + tl.program_id(1) * 2 + 1)
    query_start = tl.load(query_starts + sequence)
    query_len = tl.load(query_starts + sequence + 1) - query_start
    computed = tl.load(context_lens + sequence) - query_len
    last = tl.minimum(first + TILE_TOKENS, query_len)

    rows = tl.arange(0, TILE_ROWS)
    dim = tl.arange(0, PADDED_DIM)
    token = first + rows // GROUP
    # GROUP need not divide TILE_ROWS: the rows that are left over are nobody's.
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
    table = block_tables + sequence * table_stride
    end = computed + last
    begin = 0
    if WINDOW:
        begin = tl.maximum(computed + first - window + 1, 0) // TILE_KEYS * TILE_KEYS
    acc = tl.zeros([TILE_ROWS, PADDED_DIM], tl.float32)
    peak = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    if not WINDOW and not ALWAYS_MASKED:
        # Tiles of keys that every query sees all of.
        seen = (computed + first + 1) // TILE_KEYS * TILE_KEYS
        for start in tl.range(begin, seen, TILE_KEYS):
            acc, peak, total = attend_tile(
                queries, acc, peak, total, keys, values, table, start, end, query_positions, scale, soft_cap, window,
                slot_stride, False, False, SOFT_CAP, BLOCK_SIZE, HEAD_DIM, PADDED_DIM, TILE_KEYS,
            )  # fmt: skip
        begin = seen
    for start in tl.range(begin, end, TILE_KEYS):
        acc, peak, total = attend_tile(
            queries, acc, peak, total, keys, values, table, start, end, query_positions, scale, soft_cap, window,
            slot_stride, True, WINDOW, SOFT_CAP, BLOCK_SIZE, HEAD_DIM, PADDED_DIM, TILE_KEYS,
        )  # fmt: skip
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # rows that are nobody's have seen nothing
    if SCALED:
        result = result * tl.load(value_scale)
    tl.store(out + place[:, None] + dim[None, :], result.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class RaggedTiling:
    """How large tiles are, and how many warps and pipeline stages work on one."""

    rows: int
    keys: int
    warps: int
    stages: int

    def tokens(self, group: int) -> int:
        """New tokens of a tile, for this many query heads per KV head."""
        return self.rows // group


def tiling_for(
    *, head_dim: int, group: int, dtype: torch.dtype, kv_dtype: torch.dtype, shared_memory: int
) -> RaggedTiling:
    """Tiles that fill a chip's tensor cores and fit the shared memory of a program (227 KiB on H100 and B200, 163 on
    A100, 99 on L4, 64 on MI300X).
    """
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim {head_dim} is more than the {MAX_HEAD_DIM} that the attention kernels support")
    padded = max(16, triton.next_power_of_2(head_dim))
    if dtype == torch.float32:
        return RaggedTiling(max(32, triton.next_power_of_2(group)), 32, 4, 1)
    rows = max(128 if padded <= 128 else 64, triton.next_power_of_2(group))
    # Queries, and keys and values of each stage of the pipeline, lie in shared memory.
    for keys, stages in ((128, 2), (64, 2), (32, 2), (32, 1)):
        # Registers are what is short where 8-bit keys are widened in them, and before Hopper, whose tensor cores are
        # the first to read operands from shared memory.
        if (keys == 128 and kv_dtype.itemsize < dtype.itemsize) or (keys > 32 and shared_memory < HOPPER_SHARED_MEMORY):
            continue
        if (rows + 2 * keys * stages) * padded * dtype.itemsize <= shared_memory and keys * padded <= 128 * 128:
            return RaggedTiling(rows, keys, 8 if rows * padded >= 128 * 64 else 4, stages)
    return RaggedTiling(max(16, triton.next_power_of_2(group)), 16, 4, 1)


def tiles_of(
    query_lens: NDArray[np.int32], tile_tokens: int, *, computed: NDArray[np.int32] | None = None
) -> NDArray[np.int32]:
    """[num_tiles, 2]: (sequence, first new token) of every tile of sequences with these numbers of new tokens.

    Tiles of the end of a sequence come first: they attend to the most keys, and what takes longest should start first.
    computed: tokens before the new ones; tiles then begin at multiples of `tile_tokens` positions, the first one
    perhaps before the first new token, so that a token stands in the same row of its tile however its prompt is cut
    """
    before = np.zeros_like(query_lens) if computed is None else computed % tile_tokens
    counts = np.where(query_lens > 0, -(-(query_lens + before) // tile_tokens), 0)
    sequences = np.repeat(np.arange(len(query_lens), dtype=np.int32), counts)
    within = np.arange(len(sequences), dtype=np.int32) - np.repeat(np.cumsum(counts) - counts, counts)
    tiles = np.stack([sequences, within * tile_tokens - before[sequences]], axis=1).astype(np.int32)
    return tiles[::-1].copy()


def ragged_attention(
    q: Tensor,
    kv: KVLayer,
    out: Tensor,
    *,
    tiles: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    tiling: RaggedTiling,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    deterministic: bool = False,
) -> None:
    """Causal attention of the new tokens in `tiles`. Their own keys and values must be in the pool already.

    q, out: [num_tokens, num_heads, head_dim]
    tiles: [num_tiles, 2] int32, of tiles_of; query_starts: [num_seqs + 1] int32; context_lens: [num_seqs] int32
    block_tables: [num_seqs, max_blocks] int32
    window: a query sees this many last positions, its own included; None: all
    soft_cap: scores are soft_cap * tanh(score / soft_cap); None: as they are
    """
    _, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = kv.keys.shape
    if not len(tiles):
        return
    scaled = kv.key_scale is not None
    _ragged_attention[(num_kv_heads, len(tiles))](
        q, kv.keys, kv.values, out, tiles, query_starts, context_lens, block_tables,
        kv.key_scale if scaled else q, kv.value_scale if scaled else q,
        scale * LOG2_E.value, soft_cap or 0.0, window or 0,
        block_tables.stride(0), num_kv_heads * head_dim, num_heads,
        num_heads // num_kv_heads, head_dim, max(16, triton.next_power_of_2(head_dim)), block_size,
        tiling.rows, tiling.keys, window is not None, soft_cap is not None, scaled, deterministic,
        num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
