"""What all attention kernels do with one tile of keys: scores, online softmax, weighted values.

Online softmax: Milakov and Gimelshein (2018); tiling: FlashAttention-2 (Dao, 2023). In base 2, so that the scale of the
scores and the change of base are one multiplication. `peak` is -inf and `total` 0 while a row has seen no key.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def blocks_at(table, start, end, BLOCK_SIZE: tl.constexpr, TILE_KEYS: tl.constexpr):
    """Block numbers of the key positions start, start + 1, .. of a sequence; 0 for those from `end` on.

    Loops ask for the next tile's before they need them: the addresses of keys and values depend on them, and a load
    that waits for another one cannot be put in flight ahead.
    """
    position = start + tl.arange(0, TILE_KEYS)
    return tl.load(table + position // BLOCK_SIZE, mask=position < end, other=0)


@triton.jit
def capped(scores, scale, soft_cap, SOFT_CAP: tl.constexpr):
    """→ products of queries and keys, capped where there is a cap, and what makes them scores in base 2, a factor"""
    if SOFT_CAP:
        # tanh, without overflow: exp2 goes to 0 or inf and both are fine.
        squeezed = 1.0 - 2.0 / (tl.exp2(scores * (2.0 * scale / soft_cap)) + 1.0)
        return squeezed * (soft_cap * LOG2_E), 1.0
    else:
        return scores, scale


@triton.jit
def weighed(scores, scale, peak, total):
    """Online softmax of one tile; scores are multiplied by `scale`, which is positive.

    → weights [ROWS, TILE_KEYS], decay of what was summed before, peak, total
    """
    # Scaled after the maximum: one product for each row there, and one with the difference for each score here.
    raised = tl.maximum(peak, tl.max(scores, axis=1) * scale)
    # A row that has seen nothing has no anchor of its own: -inf minus -inf is no number.
    anchor = tl.where(raised == float("-inf"), 0.0, raised)
    weights = tl.exp2(scores * scale - anchor[:, None])
    decay = tl.exp2(peak - anchor)
    return weights, decay, raised, total * decay + tl.sum(weights, axis=1)


@triton.jit
def attend_tile(
    q,  # [ROWS, PADDED_DIM]
    acc,  # [ROWS, PADDED_DIM] float32
    peak,  # [ROWS] float32: highest score so far, base 2
    total,  # [ROWS] float32: sum of 2 ** (score - peak)
    keys, values,  # the pool, at this KV head
    blocks,  # [TILE_KEYS]: of blocks_at, for these positions
    start, end,  # key positions start, start + 1, .. of which those from `end` on do not exist
    query_positions,  # [ROWS]; -1: no query
    scale,  # of the scores, times log2(e)
    soft_cap,  # scores are soft_cap * tanh(score / soft_cap), in base e; not read unless SOFT_CAP
    window,  # a query sees this many last positions, its own included; not read unless WINDOW
    block_stride,  # elements from one block to the next
    slot_stride,  # elements from one position of a block to the next
    MASKED: tl.constexpr,  # some query may not see some key
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):  # fmt: skip
    """→ acc, peak, total with these keys taken in."""
    position = start + tl.arange(0, TILE_KEYS)
    dim = tl.arange(0, PADDED_DIM)
    exists = position < end
    place = blocks.to(tl.int64) * block_stride + position % BLOCK_SIZE * slot_stride
    if MASKED:
        known = exists[None, :] & (dim < HEAD_DIM)[:, None]
        k = tl.load(keys + place[None, :] + dim[:, None], mask=known, other=0.0)
    elif HEAD_DIM != PADDED_DIM:
        k = tl.load(keys + place[None, :] + dim[:, None], mask=(dim < HEAD_DIM)[:, None], other=0.0)
    else:
        k = tl.load(keys + place[None, :] + dim[:, None])
    scores = tl.dot(q, k.to(q.dtype), input_precision="ieee")
    scores, factor = capped(scores, scale, soft_cap, SOFT_CAP)
    if MASKED:
        visible = exists[None, :] & (position[None, :] <= query_positions[:, None])
        if WINDOW:
            visible &= position[None, :] > query_positions[:, None] - window
        scores = tl.where(visible, scores, float("-inf"))
    weights, decay, raised, total = weighed(scores, factor, peak, total)
    if MASKED:
        known = exists[:, None] & (dim < HEAD_DIM)[None, :]
        v = tl.load(values + place[:, None] + dim[None, :], mask=known, other=0.0)
    elif HEAD_DIM != PADDED_DIM:
        v = tl.load(values + place[:, None] + dim[None, :], mask=(dim < HEAD_DIM)[None, :], other=0.0)
    else:
        v = tl.load(values + place[:, None] + dim[None, :])
    acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * decay[:, None], input_precision="ieee")
    return acc, raised, total


@triton.jit
def merge(acc, peak, total, other_acc, other_peak, other_total):
    """Two partial results of the same queries as one. Peaks and totals broadcast against the accumulators."""
    raised = tl.maximum(peak, other_peak)
    # What lies before a window, or before anything was seen, has no anchor: -inf minus -inf is no number.
    anchor = tl.where(raised == float("-inf"), 0.0, raised)
    decay = tl.exp2(peak - anchor)
    weight = tl.exp2(other_peak - anchor)
    return acc * decay + other_acc * weight, raised, total * decay + other_total * weight
