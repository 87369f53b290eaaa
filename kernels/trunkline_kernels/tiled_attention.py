"""Paged attention whose bits do not depend on the batch, for --deterministic without the C kernels.

Every product has one fixed shape: 16 query rows, starting at multiples of 16 positions, and 64 keys, starting at
multiples of 64. A query at position p is always row p % 16 of its tile, and processes the key tiles in the same order,
so neither chunking nor other sequences change the order of its sums. Online softmax: Milakov and Gimelshein (2018).
"""

import torch
from torch import Tensor

from trunkline_kernels.ragged_batch import KVLayer, RaggedBatch

QUERY_TILE = 16
KEY_TILE = 64


def tiled_attention(q: Tensor, kv: KVLayer, batch: RaggedBatch, *, window: int | None, scale: float) -> Tensor:
    """Computes causal attention of all new tokens. The pool must already have their keys and values.

    q: [num_tokens, num_heads, head_dim] → like q
    window: a query sees this many last positions, including its own; None: all
    """
    out = torch.empty_like(q)
    row = 0
    for sequence, (query_len, context_len) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
        first = context_len - query_len
        kv_rows = _kv_rows(batch, kv, sequence, context_len).to(q.device)
        for tile in range(first // QUERY_TILE * QUERY_TILE, context_len, QUERY_TILE):
            start, end = max(tile, first), min(tile + QUERY_TILE, context_len)
            rows = slice(row + start - first, row + end - first)
            out[rows] = _query_tile(q[rows], start, tile, kv, kv_rows, window, scale)
        row += query_len
    return out


def _kv_rows(batch: RaggedBatch, kv: KVLayer, sequence: int, context_len: int) -> Tensor:
    """Returns the rows of KVLayer.by_token() of all positions, padded to whole key tiles: [num_tiles * KEY_TILE]
    int64."""
    positions = torch.arange(-(-context_len // KEY_TILE) * KEY_TILE)
    padding = positions >= context_len
    blocks = batch.block_tables[sequence][(positions // batch.block_size).masked_fill_(padding, 0)]
    return (blocks * kv.block_rows + positions % batch.block_size).masked_fill_(padding, kv.zero_row)


def _query_tile(
    q: Tensor, start: int, tile: int, kv: KVLayer, kv_rows: Tensor, window: int | None, scale: float
) -> Tensor:
    """Computes attention of queries from position `start` on, all within the tile that begins at position `tile`.

    q: [num_rows, num_heads, head_dim]; kv_rows: of _kv_rows → like q
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = kv.keys.shape[2]
    group = num_heads // num_kv_heads
    last = start + num_rows - 1
    queries = q.new_zeros(QUERY_TILE, num_heads, head_dim)
    queries[start - tile : start - tile + num_rows] = q
    # [num_kv_heads, group * QUERY_TILE, head_dim], by head of the group, then by position
    queries = queries.view(QUERY_TILE, num_kv_heads, group, head_dim).permute(1, 2, 0, 3).float().contiguous()
    queries = queries.view(num_kv_heads, group * QUERY_TILE, head_dim)
    positions = torch.arange(tile, tile + QUERY_TILE, device=q.device).repeat(group)[:, None]  # of each row
    highest = queries.new_full((num_kv_heads, group * QUERY_TILE, 1), float("-inf"))
    total = torch.zeros_like(highest)
    summed = torch.zeros_like(queries)
    begin = 0 if window is None else max(0, start - window + 1) // KEY_TILE * KEY_TILE
    for key_tile in range(begin, last + 1, KEY_TILE):
        read = kv_rows[key_tile : key_tile + KEY_TILE]
        k, v = (
            x[read].view(KEY_TILE, num_kv_heads, head_dim).transpose(0, 1).float().contiguous() for x in kv.by_token()
        )
        key_positions = torch.arange(key_tile, key_tile + KEY_TILE, device=q.device)[None]
        hidden = key_positions > positions
        if window is not None:
            hidden |= key_positions <= positions - window
        scores = torch.bmm(queries, k.transpose(1, 2)).mul_(scale).masked_fill_(hidden, float("-inf"))
        raised = torch.maximum(highest, scores.amax(dim=-1, keepdim=True))
        # A row that has seen no key stays at -inf; subtracting 0 instead avoids NaN.
        anchor = raised.masked_fill(raised == float("-inf"), 0.0)
        weights = torch.exp(scores - anchor)
        decay = torch.exp(highest - anchor)
        total = total * decay + weights.sum(dim=-1, keepdim=True)
        summed = summed * decay + torch.bmm(weights, v)
        highest = raised
    attended = (summed / total).view(num_kv_heads, group, QUERY_TILE, head_dim).permute(2, 0, 1, 3)
    return attended.reshape(QUERY_TILE, num_heads, head_dim)[start - tile : start - tile + num_rows].to(q.dtype)
