"""No finite logits and no parameters in range leave a row without a token, and what is drawn is what float64 says."""

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.worker.sampling_reference import LARGEST, adjusted, drawn, kept, scores
from tests.worker.sampling_rig import VOCAB, draw, logits_of, placed, row_of
from trunkline.sampling_params import EXAMPLES, LEAST_REPETITION_PENALTY, NEUTRAL, NUMBERS, TABLE
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.validation import validate_sampling
from trunkline_kernels.gpu import sampling as gpu
from trunkline_worker.engine.messages import LEAST_TEMPERATURE, resolve_sampling
from trunkline_worker.runner.batch_rows import Row
from trunkline_worker.runner.gpu.step_sampling import sample_step
from trunkline_worker.step.plan import SequenceStart

TINY = float(np.finfo(np.float32).smallest_subnormal)
SLACK = 2e-5  # float32 sums of exponentials against float64 ones
NEAR = 2e-4  # scores that are as good as equal

# Beside the least and the greatest value of each parameter, what lies next to them, its neutral value and its example.
MORE: dict[str, list[float]] = {
    "temperature": [LEAST_TEMPERATURE, 1.1e-5, 1e-4, 2.0, 99.9],
    "top_k": [0, 0, 1, 2, 40, VOCAB - 1, VOCAB, VOCAB + 1],
    "top_p": [1.0, 1.0, 1e-30, 1e-6, 0.9, 0.999999],
    "min_p": [0.0, 0.0, 1e-30, 0.05],
    "repetition_penalty": [1.3],
    "presence_penalty": [TINY],
    "frequency_penalty": [TINY],
}
BIASES = [-100.0, 100.0, TINY, 0.0, 3.5]


def float32(value: float) -> float:
    """A number as a request carries it."""
    return float(np.float32(value))


def values_of(name: str) -> list[float]:
    """Values of a parameter: its extremes, and ordinary ones."""
    row = TABLE[name]
    ends: list[float] = [0, 2**32 - 1]
    if row.least is not None and row.most is not None:
        after = float(np.nextafter(np.float32(row.least), np.float32(LARGEST)))
        before = float(np.nextafter(np.float32(row.most), np.float32(-LARGEST)))
        ends = [*([] if row.least_is_excluded else [row.least]), after, before, row.most]
    return [*ends, getattr(NEUTRAL, name), row.example, *MORE.get(name, ())]


def extreme_params(pick: random.Random) -> SamplingParams:
    """Valid parameters, as likely as not at their edges, all of them together."""
    params = SamplingParams(
        **{name: pick.choice(values_of(name)) for name in NUMBERS},  # type: ignore[arg-type]
        min_tokens=pick.choice([0, 0, 1, 100, 2**32 - 1]),
        seed=pick.choice([0, 1, 2**63, 2**64 - 1]) if pick.random() < 0.3 else pick.getrandbits(64),
        stop_token_ids=pick.sample(range(VOCAB), pick.choice([0, 1, 128])),
        ignore_eos=pick.random() < 0.5,
    )
    for token in pick.sample(range(VOCAB), pick.choice([0, 0, 1, 5, VOCAB])):
        params.logit_bias[token] = pick.choice(BIASES)
    if pick.random() < 0.3:
        params.logprobs = pick.choice([0, 1, 20])
    validate_sampling(params, vocab_size=VOCAB, eos_token_ids=[2])
    return params


def extreme_logits(pick: random.Random) -> NDArray[np.float32]:
    """Finite logits of every magnitude, equal ones among them; at times some that the model itself rules out."""
    noise = np.random.default_rng(pick.getrandbits(32))
    kind = pick.randrange(7)
    with np.errstate(over="ignore"):
        kinds: dict[int, Callable[[], NDArray[np.floating]]] = {
            0: lambda: noise.normal(0, 3, VOCAB),
            1: lambda: noise.normal(0, 1e37, VOCAB),
            2: lambda: noise.choice([LARGEST, -LARGEST, 0.0, -0.0, 1.0], VOCAB),
            3: lambda: np.full(VOCAB, pick.choice([0.0, -0.0, LARGEST, -LARGEST, TINY, 17.25])),
            4: lambda: noise.normal(0, 1, VOCAB) * TINY * 8,
            5: lambda: np.round(noise.normal(0, 2, VOCAB)),
            6: lambda: noise.normal(0, 1, VOCAB) * 10.0 ** noise.integers(-40, 38, VOCAB),
        }
        found = kinds[kind]().astype(np.float32)
    found = np.clip(found, -LARGEST, LARGEST).astype(np.float32)
    if pick.random() < 0.2:
        found[noise.integers(0, VOCAB, 20)] = -np.inf
        found[200] = 0.0  # one that no extreme case rules out
    return found


def cases(count: int, seed: int) -> Iterator[tuple[NDArray[np.float32], Row]]:
    pick = random.Random(seed)
    for _ in range(count):
        tokens = [pick.randrange(VOCAB) for _ in range(pick.choice([1, 2, 5, 60]))]
        prompt_len = pick.randint(1, len(tokens))
        sampling = resolve_sampling(extreme_params(pick), pick.randrange(3), 100, frozenset([2]))
        yield extreme_logits(pick), Row(SequenceStart(1, tokens, prompt_len, [0], sampling))


def check(logits: NDArray[np.float32], row: Row, token_id: int | None) -> None:
    """That a token was drawn which float64 draws too, or one that is as good."""
    assert token_id is not None, (row.sampling, logits.tolist())
    found = adjusted(logits, row)
    if row.sampling.temperature == 0:
        assert found[token_id] == found.max(), row.sampling
        return
    assert kept(found, row, SLACK)[token_id], row.sampling
    won = scores(found, row)
    assert won[token_id] >= won[kept(found, row, -SLACK)].max() - NEAR, row.sampling


@pytest.mark.parametrize("row_by_row", [False, True])
def test_every_extreme_of_every_parameter_draws_what_float64_draws(row_by_row: bool) -> None:
    found = list(cases(400, seed=1))
    together = torch.from_numpy(np.stack([logits for logits, _ in found]))
    done = draw(together, [row for _, row in found], row_by_row=row_by_row)
    assert done.errors == {}
    for (logits, row), token_id in zip(found, done.token_ids, strict=True):
        check(logits, row, token_id)
    asked = [i for i, (_, row) in enumerate(found) if row.sampling.logprobs is not None]
    assert sorted(done.logprobs) == asked
    for i in asked:
        entry = done.logprobs[i]
        assert not math.isnan(entry.logprob)
        assert entry.logprob <= 1e-6
        assert len(entry.top) == min(found[i][1].sampling.logprobs or 0, VOCAB)


# The interpreter computes with numpy, which warns of infinities that the kernels then bound or leave out.
@pytest.mark.filterwarnings("ignore:(overflow|underflow) encountered:RuntimeWarning")
@pytest.mark.parametrize("count", [12, pytest.param(40, marks=pytest.mark.slow)])
def test_the_device_draws_something_that_float64_allows_at_every_extreme(count: int) -> None:
    found = list(cases(count, seed=2))
    logits = torch.from_numpy(np.stack([logits for logits, _ in found]))
    device_rows, table = placed([row for _, row in found])
    samples = sample_step(logits, table, device_rows)
    for (logits_of_row, row), token_id in zip(found, samples.tokens.tolist(), strict=True):
        check(logits_of_row, row, None if token_id < 0 else token_id)
    assert all(row.error is None for row in table)


def tokens_of_reference(logits: torch.Tensor, rows: list[Row]) -> list[int | None]:
    return [drawn(row_logits.numpy(), row) for row_logits, row in zip(logits, rows, strict=True)]


def tokens_of_device(logits: torch.Tensor, rows: list[Row]) -> list[int | None]:
    device_rows, table = placed(rows)
    return list(sample_step(logits.clone(), table, device_rows).tokens.tolist())


@pytest.mark.parametrize("name", NUMBERS)
def test_every_parameter_changes_what_is_drawn_and_in_the_same_way_everywhere(name: str) -> None:
    """A parameter without a meaning in the reference, or that a sampler ignores, fails here."""
    pick = random.Random(name)
    history = [*range(VOCAB), *pick.choices(range(VOCAB), k=VOCAB)]
    logits = logits_of(1, spread=1.0).repeat(24, 1)  # level enough for every parameter to make a difference

    def rows(**sampling: Any) -> list[Row]:
        return [row_of(history, prompt_len=VOCAB, seed=seed, **sampling) for seed in range(len(logits))]

    expected = tokens_of_reference(logits, rows(**{name: EXAMPLES[name]}))
    assert expected != tokens_of_reference(logits, rows())
    assert expected == draw(logits, rows(**{name: EXAMPLES[name]})).token_ids
    assert expected == tokens_of_device(logits, rows(**{name: EXAMPLES[name]}))


def nucleus(logits: torch.Tensor, on_device: bool, seeds: int = 12, **sampling: Any) -> set[int]:
    """Every token that so many seeds draw."""
    rows = [row_of(seed=seed, **sampling) for seed in range(seeds)]
    if not on_device:
        return {token for token in draw(logits.repeat(seeds, 1), rows).token_ids if token is not None}
    device_rows, table = placed(rows)
    where = torch.tensor([(row.index, row.num_tokens) for row in table], dtype=torch.int32)
    return set(gpu.sample(logits.repeat(seeds, 1), where, device_rows).tolist())


@pytest.mark.parametrize("on_device", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_nucleus_is_minimal_and_equal_tokens_enter_it_by_id(on_device: bool) -> None:
    level = torch.zeros(1, 8)
    assert nucleus(level, on_device, top_p=0.5) == {0, 1, 2, 3}
    assert nucleus(level, on_device, top_p=0.51) == {0, 1, 2, 3, 4}
    assert nucleus(level, on_device, 4, top_p=1e-6) == {0}
    assert nucleus(level, on_device, top_k=2, top_p=0.5) == {0, 1, 2, 3}, "top_k keeps equal tokens"
    mixed = torch.tensor([[0.0, 2.0, 1.0, 2.0, -0.0, 1.0, 1.0, 2.0]])
    assert nucleus(mixed, on_device, top_p=0.3) == {1, 3}
    assert nucleus(mixed, on_device, top_p=0.75, temperature=1.0) == {1, 3, 7, 2}
    wide = torch.zeros(1, 5000)
    wide[0, 4000:4010] = 3.0
    expected = 10 * math.exp(3.0) / (4990 + 10 * math.exp(3.0))
    drawn = nucleus(wide, on_device, 5, top_p=expected + 3.5 / (4990 + 10 * math.exp(3.0)))
    assert drawn <= {*range(4), *range(4000, 4010)}
    assert drawn & set(range(4000, 4010))


def test_the_least_temperature_that_is_sampled_is_the_one_that_a_float_field_carries() -> None:
    for temperature, sampled in [(1e-5, True), (1.0001e-5, True), (0.9999e-5, False), (0.0, False)]:
        params = SamplingParams(temperature=temperature)
        assert (resolve_sampling(params, 0, 10, frozenset()).temperature > 0) is sampled


def test_a_penalty_and_a_temperature_that_overflow_together_leave_a_token() -> None:
    """Below the least penalty that a request may have, too."""
    for penalty, temperature in [(1e-36, 1e-4), (2e-38, 0.5), (LEAST_REPETITION_PENALTY, 1e-5)]:
        row = row_of([5, 6, 7], temperature=temperature, repetition_penalty=penalty, top_p=0.9, top_k=50)
        done = draw(logits_of(1), [row])
        assert done.errors == {}
        assert done.token_ids[0] is not None
