"""Attention in both directions over a ragged batch of whole texts, for encoders.

A program computes one tile: TILE_ROWS queries of one text and one head. The grid has exactly the tiles that exist.
Tiles of queries and of keys begin at the text's own tokens, so a text has the same bits whichever texts are beside it.

Reference: trunkline_kernels.full_attention.
"""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from trunkline_kernels.gpu.attention_tile import LOG2_E, weighed

# Queries, and keys, of a tile, by the size of an element: larger ones need more registers than a program has.
TILES = {2: 64, 4: 32}
NUM_WARPS = 4
MAX_HEAD_DIM = 128  # of tiles of this size, which then fit into the shared memory of every chip


@triton.jit
def _text_attention(
    q, k, v,  # [num_tokens, num_heads, HEAD_DIM]; heads are contiguous, tokens lie further apart
    out,  # like q, contiguous
    tiles,  # [num_tiles, 3] int32: first query, first token of its text, end of its text
    q_stride, k_stride, v_stride,  # elements from one token to the next
    scale,  # of the scores, times log2(e)
    window,  # positions that a query sees on each side; not read unless WINDOW
    num_heads,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Grid: (num_tiles, num_heads)"""
    tile = tiles + tl.program_id(0) * 3
    head = tl.program_id(1)
    first, begin, end = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    rows = first + tl.arange(0, TILE_ROWS)
    dim = tl.arange(0, PADDED_DIM)
    inside = (rows < end)[:, None] & (dim < HEAD_DIM)[None, :]
    at = head * HEAD_DIM + dim[None, :]
    queries = tl.load(q + rows.to(tl.int64)[:, None] * q_stride + at, mask=inside, other=0.0)
    acc = tl.zeros([TILE_ROWS, PADDED_DIM], tl.float32)
    peak = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    last = end
    if WINDOW:
        begin = tl.maximum(begin, first - window)
        last = tl.minimum(end, first + TILE_ROWS + window)
    for start in tl.range(begin, last, TILE_KEYS):
        position = start + tl.arange(0, TILE_KEYS)
        exists = position < last
        known = exists[:, None] & (dim < HEAD_DIM)[None, :]
        place = position.to(tl.int64)[:, None]
        keys = tl.load(k + place * k_stride + at, mask=known, other=0.0)
        visible = exists[None, :]
        if WINDOW:
            visible = visible & (tl.abs(position[None, :] - rows[:, None]) <= window)
        scores = tl.where(visible, tl.dot(queries, tl.trans(keys), input_precision="ieee"), float("-inf"))
        weights, decay, peak, total = weighed(scores, scale, peak, total)
        values = tl.load(v + place * v_stride + at, mask=known, other=0.0)
        acc = tl.dot(weights.to(values.dtype), values, acc * decay[:, None], input_precision="ieee")
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # rows past the end may see nothing
    target = out + (rows.to(tl.int64)[:, None] * num_heads + head) * HEAD_DIM + dim[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=inside)


def tiles_of_texts(lengths: Sequence[int], dtype: torch.dtype) -> NDArray[np.int32]:
    """Returns the tiles of queries of each text: [num_tiles, 3].  dtype: of the queries"""
    tiles, start = [], 0
    for length in lengths:
        end = start + length
        tiles += [(first, start, end) for first in range(start, end, TILES[dtype.itemsize])]
        start = end
    return np.array(tiles, np.int32)


def text_attention(q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, *, window: int | None) -> Tensor:
    """Every token of a text attends to all of its tokens, or to those at most `window` positions away.

    q, k, v: [num_tokens, num_heads, head_dim], text after text; heads must be contiguous
    tiles: tiles_of_texts() on the device → like q
    """
    num_heads, head_dim = q.shape[1:]
    assert all(x.stride()[1:] == (head_dim, 1) for x in (q, k, v)), "heads are contiguous"
    assert head_dim <= MAX_HEAD_DIM, "a tile must fit into shared memory"
    size = TILES[q.element_size()]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _text_attention[(len(tiles), num_heads)](
        q, k, v, out, tiles, q.stride(0), k.stride(0), v.stride(0), head_dim**-0.5 * LOG2_E.value, window or 0,
        num_heads, HEAD_DIM=head_dim, PADDED_DIM=max(16, triton.next_power_of_2(head_dim)), TILE_ROWS=size,
        TILE_KEYS=size, WINDOW=window is not None, num_warps=NUM_WARPS,
    )  # fmt: skip
    return out
