"""The computation of all attention kernels on one tile of keys: scores, online softmax, weighted values.

Online softmax: Milakov and Gimelshein (2018); tiling: FlashAttention-2 (Dao, 2023). Exponentials are in base 2, so that
scaling the scores and changing the base are one multiplication. Until a row has seen a key, `peak` is -inf and `total`
is 0.
"""

import os

import torch
import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
_HAS_PTX = tl.constexpr(torch.version.hip is None and os.environ.get("TRITON_INTERPRET") != "1")


@triton.jit
def blocks_at(table, start, end, BLOCK_SIZE: tl.constexpr, TILE_KEYS: tl.constexpr):
    """Returns the block numbers of TILE_KEYS key positions from `start` on: [TILE_KEYS]; 0 for positions from `end` on.

    Loops load the next tile's numbers early: the addresses of keys and values depend on them, and a load that depends
    on another load cannot be issued ahead.
    """
    position = start + tl.arange(0, TILE_KEYS)
    return tl.load(table + position.to(tl.uint32, bitcast=True) // BLOCK_SIZE, mask=position < end, other=0)


@triton.jit
def weighed(scores, scale, peak, total):
    """Computes the online softmax of one tile. Scores are multiplied by `scale`, which is positive.

    → weights [ROWS, TILE_KEYS], factor of earlier sums [ROWS], peak [ROWS], total [ROWS]
    """
    # Scaling after the maximum takes one multiplication per row, and fuses with the subtraction for each score.
    raised = tl.maximum(peak, tl.max(scores, axis=1) * scale)
    # A row that has seen no key has a peak of -inf; subtracting 0 instead avoids -inf minus -inf, which is NaN.
    anchor = tl.where(raised == float("-inf"), 0.0, raised)
    weights = tl.exp2(scores * scale - anchor[:, None])
    decay = tl.exp2(peak - anchor)
    return weights, decay, raised, total * decay + tl.sum(weights, axis=1)


@triton.jit
def _tile(
    pool,  # keys or values, at this KV head
    place,  # [TILE_KEYS] int64: of each position in the pool
    exists,  # [TILE_KEYS]; not read unless MASKED
    DTYPE: tl.constexpr,
    MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):  # fmt: skip
    """→ [TILE_KEYS, PADDED_DIM] of DTYPE"""
    paired: tl.constexpr = _HAS_PTX and pool.dtype.element_ty.primitive_bitwidth == 8
    # Two 8-bit floats are loaded and converted as one number of 16 bits. Matrix products need pairs of adjacent keys,
    # and 8-bit numbers are put together one by one for that; 16-bit ones by the load from shared memory.
    source = pool.to(tl.pointer_type(tl.int16)) if paired else pool
    width: tl.constexpr = 2 if paired else 1
    dim = tl.arange(0, PADDED_DIM // width)
    at = source + place[:, None] // width + dim[None, :]
    inside = (dim < HEAD_DIM // width)[None, :]
    if MASKED:
        x = tl.load(at, mask=exists[:, None] & inside, other=0.0)
    elif HEAD_DIM != PADDED_DIM:
        x = tl.load(at, mask=inside, other=0.0)
    else:
        x = tl.load(at)
    if paired:
        tl.static_assert(pool.dtype.element_ty == tl.float8e4nv)
        first, second = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 both;
            cvt.rn.f16x2.e4m3x2 both, $2;
            mov.b32 {$0, $1}, both;
            }
            """,
            "=h,=h,h",
            [x],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=1,
        )
        x = tl.join(first, second).reshape(TILE_KEYS, PADDED_DIM)
    return x.to(DTYPE)


@triton.jit
def attend_tile(
    q,  # [ROWS, PADDED_DIM]
    acc,  # [ROWS, PADDED_DIM] float32
    peak,  # [ROWS] float32: highest score so far, base 2
    total,  # [ROWS] float32: sum of 2 ** (score - peak)
    keys, values,  # the pool, at this KV head
    blocks,  # [TILE_KEYS]: of blocks_at, for these positions
    start, end,  # key positions from `start` on; keys from `end` on do not exist
    query_positions,  # [ROWS]; -1: no query
    scale,  # of the scores, times log2(e)
    window,  # a query sees this many last positions, including its own; not read unless WINDOW
    block_stride,  # elements from one block to the next
    slot_stride,  # elements from one position of a block to the next
    MASKED: tl.constexpr,  # some query may not see some key
    WINDOW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):  # fmt: skip
    """→ acc [ROWS, PADDED_DIM], peak [ROWS], total [ROWS], including these keys"""
    position = start + tl.arange(0, TILE_KEYS)
    exists = position < end
    # Unsigned numbers are divided by a shift.
    slot = position.to(tl.uint32, bitcast=True) % BLOCK_SIZE
    place = blocks.to(tl.int64) * block_stride + (slot * slot_stride).to(tl.int32, bitcast=True)
    # 8-bit floats become float16 rather than bfloat16, which devices convert them to in more and slower steps.
    narrow: tl.constexpr = keys.dtype.element_ty.primitive_bitwidth == 8 and q.dtype.primitive_bitwidth == 16
    dtype: tl.constexpr = tl.float16 if narrow else q.dtype
    k = _tile(keys, place, exists, dtype, MASKED, HEAD_DIM, PADDED_DIM, TILE_KEYS)
    scores = tl.dot(q.to(dtype), tl.trans(k), input_precision="ieee")
    if MASKED:
        visible = exists[None, :] & (position[None, :] <= query_positions[:, None])
        if WINDOW:
            visible &= position[None, :] > query_positions[:, None] - window
        scores = tl.where(visible, scores, float("-inf"))
    weights, decay, raised, total = weighed(scores, scale, peak, total)
    v = _tile(values, place, exists, dtype, MASKED, HEAD_DIM, PADDED_DIM, TILE_KEYS)
    acc = tl.dot(weights.to(dtype), v, acc * decay[:, None], input_precision="ieee")
    return acc, raised, total


@triton.jit
def merge(acc, peak, total, other_acc, other_peak, other_total):
    """Merges two partial results of the same queries. Peaks and totals broadcast against the accumulators."""
    raised = tl.maximum(peak, other_peak)
    # A result without visible keys has a peak of -inf; subtracting 0 instead avoids -inf minus -inf, which is NaN.
    anchor = tl.where(raised == float("-inf"), 0.0, raised)
    decay = tl.exp2(peak - anchor)
    weight = tl.exp2(other_peak - anchor)
    return acc * decay + other_acc * weight, raised, total * decay + other_total * weight
