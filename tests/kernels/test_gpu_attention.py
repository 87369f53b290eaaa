"""The Triton attention kernels, interpreted, against the naive truth. Memory that holds nothing is NaN."""

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels import attention_cases
from tests.kernels.attention_cases import BLOCK, SHAPES, make_case
from tests.kernels.attention_rig import attend, decode, truth_of
from trunkline_kernels.gpu.decode_plan import DecodePlan
from trunkline_kernels.gpu.decode_tiling import DecodeTiling
from trunkline_kernels.gpu.ragged_attention import split_tiles_of, tiles_of
from trunkline_kernels.ragged_batch import KVLayer, RaggedBatch

HEADS = [(2, 2), (6, 2), (7, 1), (16, 1)]


def heads_and_windows(*windows: int | None) -> list[Any]:
    """All pairs. The interpreter takes its time: in the quick ones each kind of heads stands once."""
    return [
        pytest.param(*heads, window, marks=() if row % len(windows) == column else pytest.mark.slow)
        for row, heads in enumerate(HEADS)
        for column, window in enumerate(windows)
    ]


def shapes_heads_and_windows() -> list[Any]:
    """Each two of a shape, heads and a window meet. The quick ones have each shape with two kinds of heads, but for
    large groups in many chunks."""
    found = []
    for number, name in enumerate(SHAPES):
        for row, heads in enumerate(HEADS):
            for column, window in enumerate((None, 1, 50)):
                is_quick = (number + row) % 2 == 0 and row % 3 == column and (name, heads) != ("chunks", (16, 1))
                if is_quick or (number + row) % 3 == column:
                    found.append(pytest.param(name, *heads, window, marks=() if is_quick else pytest.mark.slow))
    return found


@pytest.mark.parametrize(("name", "heads", "kv_heads", "window"), shapes_heads_and_windows())
def test_ragged_attention_equals_the_naive_truth(name: str, heads: int, kv_heads: int, window: int | None) -> None:
    # Of the many decodes a part: the interpreter takes a second for a few of them.
    q, kv, batch, truth = make_case(SHAPES[name][:6], heads, kv_heads)
    expected = truth_of(q, batch, truth, window)
    torch.testing.assert_close(attend(q, kv, batch, window=window, padding_tiles=len(q) % 3), expected)
    if window != 1:
        torch.testing.assert_close(attend(q, kv, batch, window=window, split=32), expected)


@pytest.mark.parametrize(("heads", "kv_heads", "window"), heads_and_windows(None, 5, 300))
@pytest.mark.parametrize(
    "contexts",
    [[1], [15, 16, 17, 31, 32, 33], pytest.param([700], marks=pytest.mark.slow), [600, 3, 1, 290, 64]],
)
def test_decode_attention_equals_the_naive_truth(
    contexts: list[int], heads: int, kv_heads: int, window: int | None
) -> None:
    q, kv, batch, truth = make_case([(1, context) for context in contexts], heads, kv_heads)
    found = decode(q, kv, batch, window=window, padding_rows=len(contexts) % 3)
    torch.testing.assert_close(found, truth_of(q, batch, truth, window))


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
def test_every_head_dim(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_cases, "HEAD_DIM", head_dim)
    q, kv, batch, truth = make_case([(1, 70), (1, 33)], 6, 2)
    torch.testing.assert_close(decode(q, kv, batch), truth_of(q, batch, truth))
    q, kv, batch, truth = make_case([(5, 37), (1, 40)], 6, 2)
    torch.testing.assert_close(attend(q, kv, batch), truth_of(q, batch, truth))
    torch.testing.assert_close(attend(q, kv, batch, split=32), truth_of(q, batch, truth))


@pytest.mark.parametrize(
    ("heads", "kv_heads"),
    [(6, 2), *(pytest.param(*heads, marks=pytest.mark.slow) for heads in ((16, 1), (2, 2), (7, 1)))],
)
def test_a_shared_prefix_is_read_for_all(heads: int, kv_heads: int) -> None:
    contexts = [70, 200, 129, 161, 130, 40, 90, 81, 300]
    q, kv, batch, truth = make_case([(1, context) for context in contexts], heads, kv_heads)
    # Sequences 1 to 4 begin with the same eight blocks, 6 and 7 with the same five.
    shared = [(1, 4, 8 * BLOCK), (6, 2, 5 * BLOCK)]
    for first, members, tokens in shared:
        for member in range(first + 1, first + members):
            batch.block_tables[member, : tokens // BLOCK] = batch.block_tables[first, : tokens // BLOCK]
            for x, y in zip(truth[member], truth[first], strict=True):
                x[:tokens] = y[:tokens]
    found = decode(q, kv, batch, padding_rows=2, shared=shared)
    torch.testing.assert_close(found, truth_of(q, batch, truth))
    torch.testing.assert_close(found, decode(q, kv, batch))


@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.slow), 45])
def test_a_tokens_bits_do_not_depend_on_how_its_prompt_is_cut(window: int | None) -> None:
    context = 133
    q, kv, batch, _ = make_case([(context, context)], 6, 2)
    whole = attend(q, kv, batch, split=64, window=window)
    for cut in ([100, 101, 132], [7, 64, 71]):
        for first, last in itertools.pairwise([0, *cut, context]):
            part = RaggedBatch(batch.positions, batch.slots, [last - first], [last], batch.block_tables, BLOCK)
            found = attend(q[first:last].contiguous(), kv, part, split=64, window=window)
            assert torch.equal(found, whole[first:last])


def test_the_grid_holds_the_tiles_that_exist_and_no_more() -> None:
    tiles = tiles_of(np.array([5, 1, 8, 9], np.int32), 4).tiles
    assert sorted(map(tuple, tiles[:, :2].tolist())) == [
        (0, 0), (0, 4), (1, 0), (2, 0), (2, 4), (3, 0), (3, 4), (3, 8)
    ]  # fmt: skip
    assert (tiles[:, 2:] == -1).all()
    assert len(tiles_of(np.array([], np.int32), 4).tiles) == 0


def test_long_decodes_are_cut_at_fixed_places() -> None:
    found = split_tiles_of(np.array([1, 1, 3, 1], np.int32), np.array([65, 64, 200, 130], np.int32), 4, 64)
    assert sorted(map(tuple, found.tiles.tolist())) == [
        (0, 0, 0, 0), (0, 0, 1, 1), (1, -3, -1, -1), (2, -1, -1, -1), (3, -1, 0, 2), (3, -1, 1, 3), (3, -1, 2, 4)
    ]  # fmt: skip
    assert found.cut.tolist() == [[0, 0, 2], [5, 2, 3]]
    assert found.num_slots == 5


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 10))])
def test_ranges_divide_all_tiles_evenly(seed: int, window: int | None) -> None:
    draw = random.Random(seed)
    lens = [draw.choice([0, 1, 31, 32, 33, draw.randrange(1, 40_000)]) for _ in range(draw.randrange(1, 40))]
    tiling = DecodeTiling(keys=32, warps=4, stages=1, programs=draw.randrange(1, 4), shortest=draw.choice([32, 128]))
    plan = DecodePlan.allocate(
        max_seqs=40, num_heads=1, num_kv_heads=1, head_dim=16, num_multiprocessors=draw.randrange(1, 30),
        tiling=tiling, device=torch.device("cpu"), windows=[None, window],
    )  # fmt: skip
    division = plan.divisions[window]
    for tensor in (division.tile_starts, division.pieces, division.ranges):
        tensor.fill_(10**6)
    prefixes = np.zeros((len(lens), 3), np.int32)
    for i, context in enumerate(lens):
        prefixes[i] = draw.choice([0, context // 2 // 16 * 16]) if window is None else 0, 5, 7
    plan.update(torch.tensor(lens, dtype=torch.int32), torch.from_numpy(prefixes))
    hidden = [0 if window is None else max(context - window, 0) // 32 for context in lens]
    counts = [
        -(-(context - int(prefix)) // 32) - out
        for context, prefix, out in zip(lens, prefixes[:, 0], hidden, strict=True)
    ]
    owners = [i for i, count in enumerate(counts) for _ in range(count)]
    assert division.tile_starts[: len(lens)].tolist() == [sum(counts[:i]) for i in range(len(lens))]
    used = [row for row in division.ranges.tolist() if row[0] <= row[1]]
    assert division.ranges.tolist()[len(used) :] == [[0, -1, 0, 0]] * (len(division.ranges) - len(used))
    assert [owners[first:end][0] for _, _, first, end in used] == [row[0] for row in used]
    assert [owners[first:end][-1] for _, _, first, end in used] == [row[1] for row in used]
    assert [first for _, _, first, _ in used] == [0, *(end for *_, end in used)][: len(used)]
    assert not used or used[-1][3] == len(owners)
    sizes = [end - first for _, _, first, end in used]
    assert not sizes or max(sizes) - min(sizes) <= 1
    assert len(used) in (0, 1) or min(sizes) >= tiling.shortest // 32
    # The pieces of a sequence are consecutive ranges, and no two pieces have the same number.
    numbers = []
    for sequence, (first, count) in enumerate(division.pieces[: len(lens)].tolist()):
        holding = [number for number, row in enumerate(used) if row[0] <= sequence <= row[1] and counts[sequence]]
        assert holding == list(range(first, first + count))[: len(holding)]
        assert len(holding) == count
        numbers += [sequence + number for number in holding]
    assert len(numbers) == len(set(numbers))
    assert max(numbers, default=0) < len(plan.partial_out)


@pytest.mark.parametrize("programs", [1, 5, *(pytest.param(count, marks=pytest.mark.slow) for count in (2, 16))])
@pytest.mark.parametrize("contexts", [[900], [40, 600, 0, 1, 31, 33, 200], [64] * 9, [1, 2, 3]])
def test_attention_is_the_same_wherever_ranges_end(contexts: list[int], programs: int) -> None:
    q, kv, batch, truth = make_case([(1, max(context, 1)) for context in contexts], 4, 2)
    expected = truth_of(q, batch, truth)
    kept = [i for i, context in enumerate(contexts) if context]
    batch.context_lens[:] = contexts
    found = decode(q, kv, batch, programs=programs, multiprocessors=3, padding_rows=2)
    torch.testing.assert_close(found[kept], expected[kept])
    # A sequence without a context is none of decode_attention's: its row is as it was.
    assert found[[i for i, context in enumerate(contexts) if not context]].isnan().all()


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
