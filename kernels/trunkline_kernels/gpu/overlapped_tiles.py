"""A loop over tiles of keys that overlaps the matrix products of one tile with the softmax of another.

Tensor cores compute products while other units compute exponentials, but within a tile the softmax needs the scores,
and the weighted values need the softmax. The loop therefore issues the scores of the next tile before the softmax of
this one. On chips with asynchronous products (compute capability 9.0 and later), the compiler waits for them after it.

Source: FlashAttention-3, overlap within a warpgroup (Shah et al., 2024).
"""

import triton
import triton.language as tl

from trunkline_kernels.gpu.attention_tile import blocks_at, weighed


@triton.jit
def attend_overlapped(
    q,  # [ROWS, PADDED_DIM]
    keys, values,  # the pool, at this KV head
    table,  # block numbers of the sequence
    seen, end,  # key positions: every query sees all keys before `seen`; keys from `end` on do not exist
    query_positions,  # [ROWS]; -1: no query
    scale, block_stride, slot_stride,  # as in attend_tile
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):  # fmt: skip
    """→ acc [ROWS, PADDED_DIM], peak [ROWS], total [ROWS] of all keys, as attend_tile computes them.

    There is one more iteration than tiles: the first processes a tile before position 0, which no query sees, and the
    last computes scores of a tile from `end` on. Neither reads memory for them. With no load outside the loop, the
    first loads are in flight together.
    """
    dim = tl.arange(0, PADDED_DIM)
    acc = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    scores = tl.zeros([ROWS, TILE_KEYS], tl.float32)
    blocks = tl.zeros([TILE_KEYS], tl.int32)
    next_blocks = blocks_at(table, 0, end, BLOCK_SIZE, TILE_KEYS)
    for start in tl.range(-TILE_KEYS, end, TILE_KEYS):
        position = start + tl.arange(0, TILE_KEYS)
        place = next_blocks.to(tl.int64) * block_stride + (position + TILE_KEYS) % BLOCK_SIZE * slot_stride
        known = (position + TILE_KEYS < end)[None, :] & (dim < HEAD_DIM)[:, None]
        k = tl.load(keys + place[None, :] + dim[:, None], mask=known, other=0.0)
        next_scores = tl.dot(q, k.to(q.dtype), input_precision="ieee")

        exists = (position >= 0) & (position < end)
        if (start < 0) | (start + TILE_KEYS > seen):
            visible = exists[None, :] & (position[None, :] <= query_positions[:, None])
            scores = tl.where(visible, scores, float("-inf"))
        weights, decay, peak, total = weighed(scores, scale, peak, total)

        place = blocks.to(tl.int64) * block_stride + position % BLOCK_SIZE * slot_stride
        known = exists[:, None] & (dim < HEAD_DIM)[None, :]
        v = tl.load(values + place[:, None] + dim[None, :], mask=known, other=0.0)
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * decay[:, None], input_precision="ieee")
        scores = next_scores
        # Block numbers of both tiles are loaded, although the next tile becomes this one in the next iteration: the
        # compiler does not pipeline loads in a loop that carries values over two iterations.
        blocks = blocks_at(table, start + TILE_KEYS, end, BLOCK_SIZE, TILE_KEYS)
        next_blocks = blocks_at(table, start + 2 * TILE_KEYS, end, BLOCK_SIZE, TILE_KEYS)
    return acc, peak, total
