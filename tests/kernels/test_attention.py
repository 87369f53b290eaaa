"""Both attention references against a naive truth, on shapes that engines get wrong."""

import math

import pytest
import torch

from tests.kernels.attention_cases import BLOCK, HEAD_DIM, SHAPES, make_case, naive
from tests.parameters import one_in
from trunkline_kernels.paged_attention import paged_attention, plan_attention
from trunkline_kernels.ragged_batch import RaggedBatch
from trunkline_kernels.tiled_attention import tiled_attention


@pytest.mark.parametrize("window", [None, 1, 5, 16, 50])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (6, 2), (8, 1), (16, 1)])
@pytest.mark.parametrize("name", one_in(2, SHAPES))
def test_attention_equals_the_naive_truth(name: str, heads: int, kv_heads: int, window: int | None) -> None:
    q, kv, batch, truth = make_case(SHAPES[name], heads, kv_heads)
    scale = 1 / math.sqrt(HEAD_DIM)
    plan = plan_attention(batch, kv, window=window, dtype=q.dtype)
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
    plan = plan_attention(batch, kv, window=None, dtype=torch.float32)
    rows = [int(row) for group in plan.decodes for row in group.rows]
    rows += [row for chunk in plan.chunks for row in range(chunk.start, chunk.start + chunk.length)]
    assert sorted(rows) == list(range(sum(batch.query_lens)))
    gathered = sum(len(group.kv_rows) for group in plan.decodes)
    needed = sum(context for query_len, context in shapes if query_len == 1)
    assert gathered <= needed * 1.5
    assert len(plan.decodes) < 15, "not one call per sequence"


def test_deterministic_attention_does_not_depend_on_the_chunk_of_a_row() -> None:
    q, kv, batch, _ = make_case([(64, 128)], 6, 2)
    whole = tiled_attention(q, kv, batch, window=None, scale=0.2)
    for start, end in ((0, 1), (5, 22), (63, 64), (16, 48)):
        part = RaggedBatch(
            batch.positions[start:end], batch.slots[start:end], [end - start], [64 + end], batch.block_tables, BLOCK
        )
        assert torch.equal(tiled_attention(q[start:end], kv, part, window=None, scale=0.2), whole[start:end])
