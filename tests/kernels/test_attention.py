"""Both attention twins against a naive truth, on shapes that engines get wrong."""

import math
import random

import pytest
import torch

from trunkline_kernels.paged_attention import paged_attention, plan_attention
from trunkline_kernels.ragged_batch import KVLayer, RaggedBatch
from trunkline_kernels.tiled_attention import tiled_attention

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
    shapes: list[tuple[int, int]], heads: int, kv_heads: int
) -> tuple[torch.Tensor, KVLayer, RaggedBatch, list[tuple[torch.Tensor, torch.Tensor]]]:
    """`shapes`: (query_len, context_len) of each sequence. Slots that hold nothing are NaN, but for the zero block."""
    generator = torch.Generator().manual_seed(0)
    blocks_of = [-(-context // BLOCK) for _, context in shapes]
    num_blocks = sum(blocks_of) + 5
    shape = (num_blocks + 1, BLOCK, kv_heads, HEAD_DIM)
    kv = KVLayer(torch.full(shape, math.nan), torch.full(shape, math.nan))
    kv.keys[-1], kv.values[-1] = 0, 0
    order = torch.randperm(num_blocks, generator=generator).tolist()
    tables = torch.full((len(shapes), max(blocks_of) + 1), num_blocks - 1)  # the tail is arbitrary
    truth, positions, slots = [], [], []
    for i, (query_len, context) in enumerate(shapes):
        blocks = torch.tensor([order.pop() for _ in range(blocks_of[i])])
        tables[i, : len(blocks)] = blocks
        where = torch.arange(context)
        at = blocks[where // BLOCK] * BLOCK + where % BLOCK
        k, v = (torch.randn(context, kv_heads, HEAD_DIM, generator=generator) for _ in range(2))
        kv.keys.view(-1, kv_heads, HEAD_DIM)[at], kv.values.view(-1, kv_heads, HEAD_DIM)[at] = k, v
        truth.append((k, v))
        positions.append(where[context - query_len :])
        slots.append(at[context - query_len :])
    batch = RaggedBatch(
        positions=torch.cat(positions),
        slots=torch.cat(slots),
        query_lens=[query_len for query_len, _ in shapes],
        context_lens=[context for _, context in shapes],
        block_tables=tables,
        block_size=BLOCK,
    )
    q = torch.randn(sum(batch.query_lens), heads, HEAD_DIM, generator=generator)
    return q, kv, batch, truth


DRAW = random.Random(2)
SHAPES = {
    "one token": [(1, 1)],
    "block borders": [(1, n) for n in (15, 16, 17, 31, 32, 33)],
    "whole prompts": [(n, n) for n in (2, 15, 16, 17, 47)],
    "chunks": [(2, 17), (16, 32), (5, 70), (64, 128), (63, 127)],
    "mixed": [(1, 5), (7, 30), (1, 200), (33, 33), (1, 64), (1, 65), (1, 1)],
    "many decodes": [(1, DRAW.randrange(1, 300)) for _ in range(40)],
}


@pytest.mark.parametrize("window", [None, 1, 5, 16, 50])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (6, 2), (8, 1), (16, 1)])
@pytest.mark.parametrize("name", SHAPES)
def test_attention_equals_the_naive_truth(name: str, heads: int, kv_heads: int, window: int | None) -> None:
    q, kv, batch, truth = make_case(SHAPES[name], heads, kv_heads)
    scale = 1 / math.sqrt(HEAD_DIM)
    plan = plan_attention(batch, window=window, zero_slot=kv.zero_slot, dtype=q.dtype, device=q.device)
    outputs = {
        "paged": paged_attention(q, kv, plan, scale=scale),
        "tiled": tiled_attention(q, kv, batch, window=window, scale=scale),
    }
    expected = []
    row = 0
    for (query_len, context), (k, v) in zip(SHAPES[name], truth, strict=True):
        expected.append(naive(q[row : row + query_len], k, v, context - query_len, window))
        row += query_len
    for kind, output in outputs.items():
        torch.testing.assert_close(output.double(), torch.cat(expected), atol=2e-6, rtol=1e-5, msg=kind)


def test_every_token_is_in_exactly_one_group_and_padding_is_bounded() -> None:
    shapes = SHAPES["many decodes"] + SHAPES["mixed"]
    _, kv, batch, _ = make_case(shapes, 4, 2)
    plan = plan_attention(batch, window=None, zero_slot=kv.zero_slot, dtype=torch.float32, device=kv.keys.device)
    rows = [int(row) for group in plan.decodes for row in group.rows]
    rows += [row for chunk in plan.chunks for row in range(chunk.start, chunk.start + chunk.length)]
    assert sorted(rows) == list(range(sum(batch.query_lens)))
    gathered = sum(len(group.slots) for group in plan.decodes)
    needed = sum(context for query_len, context in shapes if query_len == 1)
    assert gathered <= needed * 1.5
    assert len(plan.decodes) < 15, "not one call per sequence"


@pytest.mark.parametrize("kind", ["row tiles", "attention"])
def test_deterministic_bits_do_not_depend_on_where_a_row_lies(kind: str) -> None:
    if kind == "row tiles":
        from trunkline_kernels.row_tiles import map_row_tiles

        weight = torch.randn(300, 172)
        x = torch.randn(16, 172)
        rows = [
            map_row_tiles(lambda t: (torch.nn.functional.silu(t @ weight.T),), x.roll(n, 0))[0].roll(-n, 0)
            for n in range(16)
        ]
        alone = torch.cat(
            [map_row_tiles(lambda t: (torch.nn.functional.silu(t @ weight.T),), x[n : n + 1])[0] for n in range(16)]
        )
        assert all(torch.equal(row, alone) for row in rows)
        return
    q, kv, batch, _ = make_case([(64, 128)], 6, 2)
    whole = tiled_attention(q, kv, batch, window=None, scale=0.2)
    for start, end in ((0, 1), (5, 22), (63, 64), (16, 48)):
        part = RaggedBatch(
            batch.positions[start:end], batch.slots[start:end], [end - start], [64 + end], batch.block_tables, BLOCK
        )
        assert torch.equal(tiled_attention(q[start:end], kv, part, window=None, scale=0.2), whole[start:end])
