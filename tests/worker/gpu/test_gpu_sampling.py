"""Sampling on the device, interpreted, against the host's: the same tokens for the same seeds."""

import math
import random

import pytest
import torch

from tests.kernels.tensors import masked_logits
from tests.worker.sampling_rig import draw, logits_of, placed, row_of
from trunkline_kernels import token_masks
from trunkline_kernels.gpu import logprobs as gpu_logprobs
from trunkline_kernels.gpu import sampling as gpu
from trunkline_kernels.gpu import sampling_tiles
from trunkline_kernels.gpu.logit_changes import add_bias, exclude, penalise
from trunkline_worker.runner.batch_rows import Row
from trunkline_worker.runner.sampler import adjust_logits, position_logprobs


def sampled(logits: torch.Tensor, rows: list[Row]) -> list[int]:
    device_rows, table = placed(rows)
    where = torch.tensor([(row.index, row.num_tokens) for row in table], dtype=torch.int32)
    tokens: list[int] = gpu.sample(logits, where, device_rows).tolist()
    written = [int(device_rows.tokens[row.index, row.num_tokens]) for row in table]
    assert written == [max(token, 0) for token in tokens], "the next step finds it there"
    return tokens


@pytest.mark.parametrize(
    ("spread", "tile", "count"),
    [
        (0.3, 256, 10),
        (12.0, 4, 10),
        *(pytest.param(spread, tile, 30, marks=pytest.mark.slow) for spread, tile in ((0.3, 256), (3.0, 8), (12.0, 4))),
    ],
)
def test_the_same_tokens_as_on_the_host(spread: float, tile: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling_tiles, "SMALLEST_TILE", tile)
    monkeypatch.setattr(gpu, "CUT_TILES", 16)
    monkeypatch.setattr(gpu, "NUCLEUS_TILES", 2)  # a nucleus is looked for in more and more of them
    pick = random.Random(5)
    rows = [
        row_of(
            seed=pick.getrandbits(64),
            temperature=pick.choice([0.0, 0.3, 1.0, 1.7]),
            top_k=pick.choice([0, 0, 1, 2, 7, 100, 210, 211]),
            top_p=pick.choice([1.0, 1.0, 0.01, 0.5, 0.9, 0.999]),
            min_p=pick.choice([0.0, 0.0, 0.05, 1.0]),
        )
        for _ in range(count)
    ]
    logits = logits_of(len(rows), spread=spread)
    expected = draw(logits, rows).token_ids
    assert sampled(logits, rows) == expected
    assert len(set(expected)) > count // 2


def test_equal_logits_at_the_cut_all_stay() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0, -0.0]]).repeat(24, 1)
    rows = [row_of(seed=seed, top_k=2) for seed in range(24)]
    assert set(sampled(logits, rows)) == {1, 2, 3}


def test_rows_that_are_not_finite_are_told_apart() -> None:
    logits = logits_of(5)
    logits[1, 7], logits[2, 0], logits[4] = math.nan, math.inf, -math.inf
    logits[3, 5] = -math.inf  # one token that is out is nothing special
    found = sampled(logits, [row_of(seed=1, temperature=float(i % 2)) for i in range(5)])
    assert [min(token, 0) for token in found] == [0, -1, -1, 0, -2]


def test_bias_and_penalties_equal_the_hosts() -> None:
    pick = random.Random(6)
    rows = []
    for _ in range(6):
        tokens = [pick.randrange(211) for _ in range(pick.randrange(4, 30))]
        rows.append(
            row_of(
                tokens + tokens[:3],
                prompt_len=pick.randrange(1, len(tokens)),
                repetition_penalty=pick.choice([1.0, 1.3]),
                frequency_penalty=pick.choice([0.0, 0.4]),
                presence_penalty=pick.choice([0.0, -0.5]),
                logit_bias=tuple((token, pick.random()) for token in pick.sample(range(211), 3)),
                min_tokens=pick.choice([0, 100]),
                end_token_ids=frozenset([2]),
            )
        )
    found = logits_of(len(rows) + 1)
    expected = found.clone()
    for i, row in enumerate(rows):
        adjust_logits(expected[i], row)
    entries = [(i, token, bias) for i, row in enumerate(rows) for token, bias in row.sampling.logit_bias]
    entries += [(i, 2, -math.inf) for i, row in enumerate(rows) if row.num_output < row.sampling.min_tokens]
    at, ids, bias = zip(*entries, strict=True)
    add_bias(found, torch.tensor(at).int(), torch.tensor(ids).int(), torch.tensor(bias))
    device_rows, table = placed(rows)
    where = [(i, row.index, row.num_tokens) for i, row in enumerate(table)]
    longest = max(row.num_tokens for row in rows)
    penalise(found, torch.tensor(where, dtype=torch.int32), device_rows, longest)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("vocab", [1, 31, 33, 1024, 3001])
@pytest.mark.parametrize("num_words", [1, 32, 94])
def test_masks_exclude_the_same_tokens_as_the_reference(vocab: int, num_words: int) -> None:
    logits, masks = masked_logits(vocab, num_words)
    expected = logits.clone()
    token_masks.exclude(expected, masks)
    exclude(logits, masks)
    assert torch.equal(logits.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("tile", [256, 16])
def test_logprobs_equal_the_hosts(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling_tiles, "SMALLEST_TILE", tile)
    logits = logits_of(4)
    logits[0, 9] = logits[0, 3]  # equals
    chosen = [3, 0, 210, int(logits[3].argmax())]
    expected = position_logprobs(logits, chosen, [5] * 4)
    logprob, rank, ids, values = gpu_logprobs.logprobs(logits, torch.tensor(chosen), 5)
    assert rank.tolist() == [entry.rank for entry in expected]
    assert logprob.tolist() == pytest.approx([entry.logprob for entry in expected], abs=1e-5)
    assert ids.tolist() == [[token for token, _ in entry.top] for entry in expected]
    for found, entry in zip(values.tolist(), expected, strict=True):
        assert found == pytest.approx([value for _, value in entry.top], abs=1e-5)


@pytest.mark.parametrize("tile", [256, 8])
def test_the_likeliest_tokens_come_in_order_wherever_they_lie(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them in one tile, equal ones in many tiles, and tokens that are out last."""
    monkeypatch.setattr(sampling_tiles, "SMALLEST_TILE", tile)
    logits = logits_of(4)
    logits[0, 16:24] += 100
    logits[1] = 1.5
    logits[2, 5:] = -math.inf
    logits[3] = logits[3].round()
    _, _, ids, values = gpu_logprobs.logprobs(logits, torch.zeros(4, dtype=torch.int64), 12)
    for row, found, told in zip(logits.tolist(), ids.tolist(), values.tolist(), strict=True):
        expected = sorted(range(len(row)), key=lambda token: (-row[token], token))[:12]
        assert found == expected
        shifted = [row[token] for token in expected]
        assert [value - told[0] for value in told] == pytest.approx([x - shifted[0] for x in shifted], abs=1e-5)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_rows_logprobs_do_not_depend_on_the_others(rows: int) -> None:
    logits, chosen = logits_of(4), torch.tensor([7, 8, 9, 10])
    whole = gpu_logprobs.logprobs(logits, chosen, 4)
    part = gpu_logprobs.logprobs(logits[:rows].contiguous(), chosen[:rows], 4)
    assert all(torch.equal(one, other[:rows]) for one, other in zip(part, whole, strict=True))
