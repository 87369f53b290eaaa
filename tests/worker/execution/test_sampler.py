"""Sampling against naive references, and the statistics and stability of its randomness."""

import math
import random
from typing import Any

import numpy as np
import pytest
import torch

from tests.worker.sampling_rig import VOCAB, draw, logits_of, row_of
from trunkline_worker.runner.batch_rows import Row
from trunkline_worker.step.plan import Sampling
from trunkline_worker.step.sampling_key import choice_seed, position_key, race_noise, token_bits


def allowed_naively(logits: list[float], s: Sampling) -> set[int]:
    """top_k, then top_p over what it left, then min_p; by sorting, as a textbook would."""
    scaled = [x / s.temperature for x in logits]
    order = sorted(range(len(scaled)), key=lambda i: -scaled[i])
    kept = order[: s.top_k] if s.top_k else order
    weights = {i: math.exp(scaled[i] - scaled[order[0]]) for i in kept}
    total, mass = sum(weights.values()), 0.0
    nucleus: list[int] = []
    for i in kept:
        if mass >= s.top_p - 1e-9 and nucleus:
            break
        nucleus.append(i)
        mass += weights[i] / total
    return {i for i in nucleus if weights[i] >= s.min_p}


@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_only_tokens_that_top_k_top_p_and_min_p_keep_are_drawn(spread: float) -> None:
    pick = random.Random(4)
    for case in range(60):
        s: dict[str, Any] = {
            "temperature": pick.choice([0.5, 1.0, 1.7]),
            "top_k": pick.choice([0, 1, 5, 50, 500]),
            "top_p": pick.choice([1.0, 0.9, 0.5, 0.01]),
            "min_p": pick.choice([0.0, 0.05, 0.5]),
        }
        logits = logits_of(1, seed=case, spread=spread)
        allowed = allowed_naively(logits[0].tolist(), Sampling(max_tokens=1, **s))
        drawn = {draw(logits, [row_of(seed=n, **s)]).token_ids[0] for n in range(40)}
        assert drawn <= allowed
        if len(allowed) == 1:
            assert drawn == allowed


def test_draws_follow_the_distribution() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.125, 0.0625, 0.0625]]))
    count = 4000
    rows = [row_of(seed=choice_seed(n, 0)) for n in range(count)]
    tokens = draw(logits.repeat(count, 1), rows).token_ids
    observed = np.bincount(np.array(tokens), minlength=5)
    expected = logits.exp()[0].numpy() * count
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    assert chi_square < 18.5, "one in a thousand for four degrees of freedom"


def test_positions_and_choices_are_independent_draws() -> None:
    logits = torch.zeros(1, VOCAB)
    by_position = [draw(logits, [row_of([5] * n, seed=1)]).token_ids[0] for n in range(3, 203)]
    by_choice = [draw(logits, [row_of(seed=choice_seed(1, n))]).token_ids[0] for n in range(200)]
    assert len(set(by_position)) > 100
    assert len(set(by_choice)) > 100


def test_golden_vectors_of_the_key() -> None:
    """Pinned: a generation must continue the same on a worker of another version."""
    assert choice_seed(1, 0) == GOLDEN_SEED_10
    assert choice_seed(2**64 - 1, 7) == GOLDEN_SEED_MAX
    assert position_key(12345, 678) == GOLDEN_POSITION
    bits = token_bits(np.array([GOLDEN_POSITION], np.uint64), np.array([0, 1, 31999], np.int64))
    assert bits.tolist() == GOLDEN_BITS
    assert np.isfinite(race_noise(np.array([0], np.uint64), np.arange(100_000))).all()


GOLDEN_SEED_10 = 0x1AE5C64125880F18
GOLDEN_SEED_MAX = 0xE6E4C521CBC19714
GOLDEN_POSITION = 0xF2A8E2097B204F61
GOLDEN_BITS = [3004418720, 1199428000, 1053142687]


def mixed_rows() -> list[Row]:
    tokens = [5, 6, 7, 9, 9, 11]
    return [
        row_of(temperature=0.0),
        row_of(temperature=0.8, seed=3),
        row_of(tokens, temperature=0.0, repetition_penalty=1.3),
        row_of(tokens, temperature=1.0, presence_penalty=1.0, frequency_penalty=0.5, seed=4),
        row_of(temperature=1.2, top_k=7, seed=5),
        row_of(temperature=1.0, top_p=0.7, seed=6, logprobs=5),
        row_of(temperature=0.0, logit_bias=((17, 50.0),)),
        row_of(temperature=0.7, min_p=0.2, seed=7, logprobs=0),
        row_of(temperature=1.0, min_tokens=5, end_token_ids=frozenset({3, 4}), seed=8),
    ]


@pytest.mark.parametrize("row_by_row", [False, True])
def test_a_row_gets_the_same_in_any_company(row_by_row: bool) -> None:
    logits = logits_of(9, spread=2.0)
    together = draw(logits, mixed_rows(), row_by_row=row_by_row)
    for i, row in enumerate(mixed_rows()):
        alone = draw(logits[i : i + 1], [row], row_by_row=row_by_row)
        assert alone.token_ids[0] == together.token_ids[i]
        assert (0 in alone.logprobs) == (i in together.logprobs)
        if row_by_row and 0 in alone.logprobs:
            assert alone.logprobs[0] == together.logprobs[i]


def naive_penalties(logits: list[float], row: Row) -> list[float]:
    s, out = row.sampling, list(logits)
    output = row.tokens[row.prompt_len :].tolist()
    for token, bias in s.logit_bias:
        out[token] += bias
    for token in set(row.tokens.tolist()):
        out[token] = out[token] / s.repetition_penalty if out[token] > 0 else out[token] * s.repetition_penalty
    for token in set(output):
        out[token] -= s.presence_penalty + s.frequency_penalty * output.count(token)
    return out


def test_penalties_equal_their_definition() -> None:
    tokens = [5, 6, 7, 9, 9, 11, 5]
    for case in range(40):
        logits = logits_of(1, seed=case, spread=0.5)
        row = row_of(
            tokens, temperature=0.0, repetition_penalty=1.5, presence_penalty=0.7, frequency_penalty=0.4,
            logit_bias=((9, 2.0), (50, 1.0)),
        )  # fmt: skip
        expected = naive_penalties(logits[0].tolist(), row)
        assert draw(logits, [row]).token_ids[0] == max(range(VOCAB), key=lambda i: expected[i])


def test_end_tokens_cannot_be_drawn_before_min_tokens() -> None:
    logits = torch.full((1, VOCAB), -50.0)
    logits[0, 3] = 10.0
    row = row_of(temperature=1.0, min_tokens=1, end_token_ids=frozenset({3}), seed=1)
    assert draw(logits, [row]).token_ids[0] != 3
    later = row_of([5, 6, 7, 8], temperature=1.0, min_tokens=1, end_token_ids=frozenset({3}), seed=1)
    assert draw(logits, [later]).token_ids[0] == 3


def test_greedy_takes_the_lowest_of_equal_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [40, 60]] = 1.0
    assert draw(logits, [row_of(temperature=0.0)]).token_ids == [40]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_finite_logits_fails_alone(bad: float, temperature: float) -> None:
    logits = logits_of(3)
    if bad == -math.inf:
        logits[1] = bad
    else:
        logits[1, 7] = bad
    rows = [row_of(temperature=temperature, seed=n, logprobs=1) for n in range(3)]
    done = draw(logits, rows)
    assert done.token_ids[1] is None
    assert list(done.errors) == [1]
    alone = [draw(logits[i : i + 1], [rows[i]]).token_ids[0] for i in (0, 2)]
    assert [done.token_ids[0], done.token_ids[2]] == alone


def test_logprobs_are_of_the_untouched_distribution() -> None:
    logits = logits_of(1)
    row = row_of(temperature=0.3, logit_bias=((8, 90.0),), logprobs=4, seed=1)
    done = draw(logits, [row])
    expected = logits.log_softmax(-1)[0]
    entry = done.logprobs[0]
    assert done.token_ids == [8] == [entry.token_id]
    assert entry.logprob == pytest.approx(float(expected[8]), abs=1e-6)
    assert entry.rank == int((expected > expected[8]).sum()) + 1
    assert [token for token, _ in entry.top] == expected.topk(4).indices.tolist()


def test_pruning_what_noise_cannot_lift_changes_nothing() -> None:
    logits = logits_of(1, spread=12.0)
    for n in range(50):
        key = np.array([position_key(n, 3)], np.uint64)
        scores = logits[0].numpy().astype(np.float64) + race_noise(key, np.arange(VOCAB))
        assert draw(logits, [row_of(temperature=1.0, seed=n)]).token_ids[0] == int(scores.argmax())
