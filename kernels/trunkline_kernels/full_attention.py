"""Attention in both directions over a ragged batch of whole texts, without KV blocks: the reference."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

WINDOW_QUERIES = 512  # queries of a text that are computed at a time where each sees a window only


def full_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], *, window: int | None, is_invariant: bool = True
) -> Tensor:
    """Every token of a text attends to all of its tokens, or to those at most `window` positions away.

    q, k, v: [num_tokens, num_heads, head_dim], text after text; lengths: tokens of each text → like q
    is_invariant: the texts beside it do not change the bits of a text's result: it is computed from memory of its own
    """
    attended, end = q.new_empty(q.shape), 0
    for length in lengths:
        text = slice(end, end + length)
        own, seen, read = (x[text].transpose(0, 1) for x in (q, k, v))
        if is_invariant:
            own, seen, read = own.contiguous(), seen.contiguous(), read.contiguous()
        attended[text] = _of_one_text(own, seen, read, window)
        end = text.stop
    return attended


def _of_one_text(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """[num_heads, length, head_dim] → [length, num_heads, head_dim]"""
    length = q.shape[1]
    if window is None or window >= length - 1:
        return scaled_dot_product_attention(q[None], k[None], v[None])[0].transpose(0, 1)
    parts = []
    for start in range(0, length, WINDOW_QUERIES):
        end = min(start + WINDOW_QUERIES, length)
        seen = slice(max(0, start - window), min(length, end + window))
        distance = torch.arange(seen.start, seen.stop) - torch.arange(start, end)[:, None]
        mask = (distance.abs() <= window).to(q.device)
        part = scaled_dot_product_attention(q[None, :, start:end], k[None, :, seen], v[None, :, seen], mask)
        parts.append(part[0].transpose(0, 1))
    return torch.cat(parts)
