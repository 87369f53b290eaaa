"""Ragged batches of shapes that engines get wrong, and what attention over them is."""

import math
import random

import torch

from trunkline_kernels.ragged_batch import KVLayer, RaggedBatch, allocate_kv

BLOCK = 16
HEAD_DIM = 24


def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int, window: int | None) -> torch.Tensor:
    """q [n, H, D] at positions first.., k and v [L, Hkv, D] → [n, H, D], in float64."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) / math.sqrt(q.shape[2])
    queries, keys = torch.arange(first, first + len(q))[:, None], torch.arange(len(k))[None]
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), v)


def make_case(
    shapes: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    dtype: torch.dtype = torch.float32,
    *,
    head_dim: int = HEAD_DIM,
    block_size: int = BLOCK,
) -> tuple[torch.Tensor, KVLayer, RaggedBatch, list[tuple[torch.Tensor, torch.Tensor]]]:
    """`shapes`: (query_len, context_len) of each sequence; `dtype`: of queries and pool.

    The layer is the middle one of three. Slots that hold nothing are NaN, but for the zero block, and so are the other
    layers."""
    generator = torch.Generator().manual_seed(0)
    blocks_of = [-(-context // block_size) for _, context in shapes]
    num_blocks = sum(blocks_of) + 5
    pool = allocate_kv(
        num_layers=3, num_blocks=num_blocks, block_size=block_size, num_kv_heads=kv_heads, head_dim=head_dim,
        dtype=dtype, device=torch.device("cpu"),
    )  # fmt: skip
    pool.blocks[:-1] = math.nan
    kv = pool.layers[1]
    order = torch.randperm(num_blocks, generator=generator).tolist()
    tables = torch.full((len(shapes), max(blocks_of) + 1), num_blocks - 1)  # the tail is arbitrary
    truth, positions, slots = [], [], []
    for i, (query_len, context) in enumerate(shapes):
        blocks = torch.tensor([order.pop() for _ in range(blocks_of[i])])
        tables[i, : len(blocks)] = blocks
        where = torch.arange(context)
        at = blocks[where // block_size], where % block_size
        k, v = (torch.randn(context, kv_heads, head_dim, generator=generator) for _ in range(2))
        kv.keys[at], kv.values[at] = k.to(dtype), v.to(dtype)
        truth.append((k, v))
        positions.append(where[context - query_len :])
        slots.append((at[0] * block_size + at[1])[context - query_len :])
    batch = RaggedBatch(
        positions=torch.cat(positions),
        slots=torch.cat(slots),
        query_lens=[query_len for query_len, _ in shapes],
        context_lens=[context for _, context in shapes],
        block_tables=tables,
        block_size=block_size,
    )
    q = torch.randn(sum(batch.query_lens), heads, head_dim, generator=generator)
    return q.to(dtype), kv, batch, truth


DRAW = random.Random(2)
SHAPES = {
    "one token": [(1, 1)],
    "block borders": [(1, n) for n in (15, 16, 17, 31, 32, 33)],
    "whole prompts": [(n, n) for n in (2, 15, 16, 17, 47)],
    "chunks": [(2, 17), (16, 32), (5, 70), (64, 128), (63, 127)],
    "mixed": [(1, 5), (7, 30), (1, 200), (33, 33), (1, 64), (1, 65), (1, 1)],
    "many decodes": [(1, DRAW.randrange(1, 300)) for _ in range(40)],
}
