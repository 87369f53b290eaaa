"""The Triton attention kernels, interpreted, against the naive truth. Memory that holds nothing is NaN."""

import itertools
import math
import random

import numpy as np
import pytest
import torch

from tests.kernels.test_attention import BLOCK, HEAD_DIM, SHAPES, make_case, naive
from trunkline_kernels.gpu.decode_attention import DecodePlan, DecodeTiling, decode_attention
from trunkline_kernels.gpu.ragged_attention import RaggedTiling, ragged_attention, tiles_of
from trunkline_kernels.ragged_batch import KVLayer, RaggedBatch

SCALE = 1 / math.sqrt(HEAD_DIM)
TILING = RaggedTiling(rows=32, keys=32, warps=4, stages=1)
HEADS = [(2, 2), (6, 2), (7, 1), (16, 1)]


def attend(
    q: torch.Tensor,
    kv: KVLayer,
    batch: RaggedBatch,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    deterministic: bool = False,
    tiling: RaggedTiling = TILING,
) -> torch.Tensor:
    group = q.shape[1] // kv.keys.shape[2]
    query_lens = np.array(batch.query_lens, np.int32)
    computed = np.array(batch.context_lens, np.int32) - query_lens if deterministic else None
    out = torch.full_like(q, math.nan)
    ragged_attention(
        q,
        kv,
        out,
        tiles=torch.from_numpy(tiles_of(query_lens, tiling.tokens(group), computed=computed)),
        query_starts=torch.tensor([0, *itertools.accumulate(batch.query_lens)], dtype=torch.int32),
        context_lens=torch.tensor(batch.context_lens, dtype=torch.int32),
        block_tables=batch.block_tables.int(),
        tiling=tiling,
        scale=SCALE,
        window=window,
        soft_cap=soft_cap,
        deterministic=deterministic,
    )
    return out


def decode(
    q: torch.Tensor,
    kv: KVLayer,
    batch: RaggedBatch,
    *,
    window: int | None = None,
    multiprocessors: int = 4,
    fixed_len: int | None = None,
    padding_rows: int = 0,
) -> torch.Tensor:
    plan = DecodePlan.allocate(
        max_seqs=len(q) + padding_rows + 3,
        num_heads=q.shape[1],
        num_kv_heads=kv.keys.shape[2],
        head_dim=q.shape[2],
        num_multiprocessors=multiprocessors,
        device=q.device,
        fixed_len=fixed_len,
        max_context=max(batch.context_lens),
    )
    for tensor in (plan.partial_out, plan.partial_stats):
        tensor.fill_(math.nan)
    context_lens = torch.tensor([*batch.context_lens, *[0] * padding_rows], dtype=torch.int32)
    tables = torch.nn.functional.pad(batch.block_tables.int(), (0, 0, 0, padding_rows))
    padded = torch.nn.functional.pad(q, (0, 0, 0, 0, 0, padding_rows), value=math.nan)
    out = torch.full_like(padded, math.nan)
    plan.update(context_lens)
    tiling = DecodeTiling(keys=32, warps=4, stages=1)
    decode_attention(
        padded, kv, out, context_lens=context_lens, block_tables=tables, plan=plan, tiling=tiling, scale=SCALE,
        window=window,
    )  # fmt: skip
    assert out[len(q) :].isnan().all()
    return out[: len(q)]


def truth_of(
    q: torch.Tensor,
    batch: RaggedBatch,
    truth: list[tuple[torch.Tensor, torch.Tensor]],
    window: int | None = None,
) -> torch.Tensor:
    parts, row = [], 0
    for (k, v), length, context in zip(truth, batch.query_lens, batch.context_lens, strict=True):
        parts.append(naive(q[row : row + length], k, v, context - length, window))
        row += length
    return torch.cat(parts).float()


@pytest.mark.parametrize("window", [None, 1, 50])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("name", SHAPES)
def test_ragged_attention_equals_the_naive_truth(name: str, heads: int, kv_heads: int, window: int | None) -> None:
    q, kv, batch, truth = make_case(SHAPES[name], heads, kv_heads)
    torch.testing.assert_close(attend(q, kv, batch, window=window), truth_of(q, batch, truth, window))


@pytest.mark.parametrize("window", [None, 5, 300])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize("fixed_len", [None, 64])
@pytest.mark.parametrize("contexts", [[1], [15, 16, 17, 31, 32, 33], [700], [600, 3, 1, 290, 64]])
def test_decode_attention_equals_the_naive_truth(
    contexts: list[int], fixed_len: int | None, heads: int, kv_heads: int, window: int | None
) -> None:
    q, kv, batch, truth = make_case([(1, context) for context in contexts], heads, kv_heads)
    found = decode(q, kv, batch, window=window, fixed_len=fixed_len, padding_rows=len(contexts) % 3)
    torch.testing.assert_close(found, truth_of(q, batch, truth, window))


def test_scores_are_capped() -> None:
    q, kv, batch, truth = make_case([(9, 40), (1, 33)], 4, 2)
    parts, row = [], 0
    for (k, v), length, context in zip(truth, batch.query_lens, batch.context_lens, strict=True):
        queries = q[row : row + length].double()
        keys, values = (x.double().repeat_interleave(2, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * SCALE
        scores = 1.5 * torch.tanh(scores / 1.5)
        hidden = torch.arange(context)[None] > torch.arange(context - length, context)[:, None]
        parts.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), values))
        row += length
    torch.testing.assert_close(attend(q, kv, batch, soft_cap=1.5), torch.cat(parts).float())


def test_a_tokens_bits_do_not_depend_on_how_its_prompt_is_cut() -> None:
    context = 133
    q, kv, batch, _ = make_case([(context, context)], 6, 2)
    whole = attend(q, kv, batch, deterministic=True)
    draw = random.Random(0)
    for _ in range(3):
        cut = sorted(draw.sample(range(1, context), 4))
        for first, last in itertools.pairwise([0, *cut, context]):
            part = RaggedBatch(batch.positions, batch.slots, [last - first], [last], batch.block_tables, BLOCK)
            found = attend(q[first:last].contiguous(), kv, part, deterministic=True)
            assert torch.equal(found, whole[first:last])


def test_the_grid_holds_the_tiles_that_exist_and_no_more() -> None:
    tiles = tiles_of(np.array([5, 1, 8, 9], np.int32), 4)
    assert sorted(map(tuple, tiles.tolist())) == [(0, 0), (0, 4), (1, 0), (2, 0), (2, 4), (3, 0), (3, 4), (3, 8)]
    assert len(tiles_of(np.array([], np.int32), 4)) == 0


@pytest.mark.parametrize("seed", range(20))
def test_pieces_cover_every_context_once(seed: int) -> None:
    draw = random.Random(seed)
    lens = [draw.choice([0, 1, 255, 256, 257, draw.randrange(1, 40_000)]) for _ in range(draw.randrange(1, 40))]
    plan = DecodePlan.allocate(
        max_seqs=40, num_heads=1, num_kv_heads=1, head_dim=16, num_multiprocessors=draw.randrange(1, 200),
        device=torch.device("cpu"),
    )  # fmt: skip
    plan.update(torch.tensor(lens, dtype=torch.int32))
    length, starts = int(plan.piece_len[0]), plan.piece_starts[: len(lens) + 1].tolist()
    sequences = plan.piece_sequences[: plan.num_pieces(len(lens))].tolist()
    expected = [i for i, context in enumerate(lens) for _ in range(-(-context // length))]
    assert sequences[: len(expected)] == expected
    assert set(sequences[len(expected) :]) <= {-1}
    assert starts == [expected.index(i) if i in expected else starts[i] for i in range(len(lens))] + [len(expected)]
    assert [starts[i + 1] - starts[i] for i in range(len(lens))] == [expected.count(i) for i in range(len(lens))]


def test_keys_and_values_of_8_bits() -> None:
    q, kv, batch, truth = make_case([(1, 5), (1, 130), (1, 64)], 4, 2)
    scales = torch.tensor([0.5]), torch.tensor([2.0])
    narrow = [(pool / scale).to(torch.float8_e4m3fn) for pool, scale in zip((kv.keys, kv.values), scales, strict=True)]
    rounded = [
        tuple((x / scale).to(torch.float8_e4m3fn).float() * scale for x, scale in zip(pair, scales, strict=True))
        for pair in truth
    ]
    expected = truth_of(q, batch, rounded)  # type: ignore[arg-type]
    eight = KVLayer(narrow[0], narrow[1], *scales)
    torch.testing.assert_close(decode(q, eight, batch), expected)
    torch.testing.assert_close(attend(q, eight, batch), expected)
