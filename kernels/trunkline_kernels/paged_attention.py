"""Attention of a ragged batch over paged keys and values, in plain PyTorch: the reference of the Triton kernels.

Source of the paging: vLLM (Kwon et al., SOSP 2023); of mixing chunks and decodes in one step: Sarathi-Serve (Agrawal
et al., OSDI 2024). CPU workers with --kernels=torch use it too, so it avoids one call per sequence if possible: decodes
of similar context length form a group, whose keys are gathered once and which takes one call.

All layers with the same window gather the same rows, so `plan_attention` plans them once per step.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from trunkline_kernels.ragged_batch import KVLayer, RaggedBatch

# Decodes share a group if padding to the longest context adds less than this share of the group's positions.
MAX_GROUP_PADDING = 0.25


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences with one new token each, and contexts of similar length."""

    rows: Tensor  # [group] int64: rows among the batch's tokens
    kv_rows: Tensor  # [group * padded_len] int64: rows of KVLayer.by_token(); the zero row past each context
    mask: Tensor  # [group, 1, 1, padded_len] float: 0 where there is a key, -inf in the padding
    padded_len: int


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """A sequence with several new tokens."""

    start: int  # its rows are start : start + length
    length: int
    kv_rows: Tensor  # [visible_len] int64: rows of KVLayer.by_token()
    mask: Tensor | None  # [length, visible_len] float; None: plain causal, nothing before the chunk


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The groups and chunks of a batch, for layers with the same window."""

    decodes: list[DecodeGroup]
    chunks: list[PrefillChunk]


def plan_attention(batch: RaggedBatch, kv: KVLayer, *, window: int | None, dtype: torch.dtype) -> AttentionPlan:
    """Groups the batch on the host, and returns a plan for all layers of the pool that `kv` is one of.

    window: a query sees this many last positions, including its own; None: all
    dtype: of the queries, and of masks
    """
    decodes: list[tuple[int, int, int]] = []  # (context length, sequence, row)
    chunks: list[PrefillChunk] = []
    row = 0
    for sequence, (query_len, context_len) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
        if query_len == 1:
            decodes.append((context_len, sequence, row))
        else:
            chunks.append(_plan_chunk(batch, kv, sequence, row, window, dtype))
        row += query_len
    decodes.sort()
    groups: list[DecodeGroup] = []
    while decodes:
        size = _group_size(decodes, window, slack=2 * batch.block_size)
        groups.append(_plan_group(batch, kv, decodes[:size], window, dtype))
        decodes = decodes[size:]
    return AttentionPlan(groups, chunks)


def _group_size(decodes: list[tuple[int, int, int]], window: int | None, slack: int) -> int:
    """Returns how many of the shortest contexts form a group without too much padding. At least one."""
    total = 0
    for count, (context_len, _, _) in enumerate(decodes, start=1):
        visible = _visible(context_len, window)
        total += visible
        if count > 1 and visible * count > total * (1 + MAX_GROUP_PADDING) + slack:
            return count - 1
    return len(decodes)


def _visible(context_len: int, window: int | None) -> int:
    return context_len if window is None else min(context_len, window)


def _plan_chunk(
    batch: RaggedBatch, kv: KVLayer, sequence: int, row: int, window: int | None, dtype: torch.dtype
) -> PrefillChunk:
    context_len, length, device = batch.context_lens[sequence], batch.query_lens[sequence], kv.keys.device
    first, size = context_len - length, batch.block_size
    oldest = 0 if window is None else max(0, first - window + 1)
    keys = torch.arange(oldest, context_len)
    rows = batch.block_tables[sequence][keys // size] * kv.block_rows + keys % size
    if first == 0 and _visible(context_len, window) == context_len:
        return PrefillChunk(row, length, rows.to(device), None)
    queries = torch.arange(first, context_len)[:, None]
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
    return PrefillChunk(row, length, rows.to(device), mask.to(device))


def _plan_group(
    batch: RaggedBatch, kv: KVLayer, members: list[tuple[int, int, int]], window: int | None, dtype: torch.dtype
) -> DecodeGroup:
    contexts = torch.tensor([context for context, _, _ in members])[:, None]
    oldest = torch.zeros_like(contexts) if window is None else (contexts - window).clamp_(min=0)
    padded_len = int((contexts - oldest).max())
    positions = oldest + torch.arange(padded_len)  # [group, padded_len]
    padding = positions >= contexts
    size = batch.block_size
    tables = batch.block_tables[torch.tensor([sequence for _, sequence, _ in members])]
    blocks = tables.gather(1, (positions // size).masked_fill_(padding, 0))
    kv_rows = (blocks * kv.block_rows + positions % size).masked_fill_(padding, kv.zero_row)
    mask = torch.zeros(padding.shape, dtype=dtype).masked_fill_(padding, float("-inf"))
    rows = torch.tensor([row for _, _, row in members])
    device = kv.keys.device
    return DecodeGroup(rows.to(device), kv_rows.flatten().to(device), mask[:, None, None].to(device), padded_len)


def paged_attention(q: Tensor, kv: KVLayer, plan: AttentionPlan, *, scale: float) -> Tensor:
    """Computes causal attention of all new tokens. The pool must already have their keys and values.

    q: [num_tokens, num_heads, head_dim] → [num_tokens, num_heads, head_dim]
    """
    _, num_heads, head_dim = q.shape
    num_kv_heads = kv.keys.shape[2]
    group = num_heads // num_kv_heads
    keys, values = kv.by_token()
    out = torch.empty_like(q)
    for decode in plan.decodes:
        count = len(decode.rows)
        shape = (count, decode.padded_len, num_kv_heads, head_dim)
        k = keys.index_select(0, decode.kv_rows).view(shape).transpose(1, 2)
        v = values.index_select(0, decode.kv_rows).view(shape).transpose(1, 2)
        # The query heads of one KV head become query rows: [count, num_kv_heads, group, head_dim]
        queries = q[decode.rows].view(count, num_kv_heads, group, head_dim)
        mask = decode.mask.expand(count, num_kv_heads, group, decode.padded_len)
        attended = scaled_dot_product_attention(queries, k, v, attn_mask=mask, scale=scale)
        out[decode.rows] = attended.reshape(count, num_heads, head_dim)
    for chunk in plan.chunks:
        shape = (1, len(chunk.kv_rows), num_kv_heads, head_dim)
        k = keys.index_select(0, chunk.kv_rows).view(shape).transpose(1, 2)
        v = values.index_select(0, chunk.kv_rows).view(shape).transpose(1, 2)
        queries = q[chunk.start : chunk.start + chunk.length].transpose(0, 1)[None]
        attended = scaled_dot_product_attention(
            queries, k, v, attn_mask=chunk.mask, is_causal=chunk.mask is None, scale=scale, enable_gqa=group > 1
        )
        out[chunk.start : chunk.start + chunk.length] = attended[0].transpose(0, 1)
    return out
