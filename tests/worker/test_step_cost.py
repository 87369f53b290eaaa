"""What a step costs, learned from steps: no prompt is thought to take many times what it does, whatever they are."""

from collections.abc import Iterable
from random import Random

import pytest

from trunkline_worker.step_cost import KEPT_STEPS, STEPS_PER_FIT, StepCost, StepLoad, chunk_pairs

FIXED_S, TOKEN_S, KV_TOKEN_S, PAIR_S = 5e-3, 3e-4, 1e-7, 2e-7
PROMPT = 512


def chunk(num_tokens: int, *, decodes: int = 0, decode_kv_tokens: int = 0) -> StepLoad:
    return StepLoad(num_tokens + decodes, decode_kv_tokens, chunk_pairs(num_tokens, 0))


def true_s(load: StepLoad) -> float:
    return FIXED_S + TOKEN_S * load.num_tokens + KV_TOKEN_S * load.decode_kv_tokens + PAIR_S * load.chunk_pairs


def learned(steps: Iterable[tuple[StepLoad, float]]) -> StepCost:
    cost = StepCost()
    for load, time_s in steps:
        cost.observe(load, time_s)
    assert cost.is_known
    return cost


def prompt_s(cost: StepCost) -> float:
    return cost.fixed_s + cost.chunk_s(PROMPT, 0)


@pytest.mark.parametrize("seed", range(5))
def test_first_steps_that_are_slow_and_then_all_alike_do_not_make_prompts_slow(seed: int) -> None:
    rng = Random(seed)
    first = [(chunk(rng.randint(9, 30), decodes=2, decode_kv_tokens=40), 0.0) for _ in range(3)]
    steps = [(load, 5 * true_s(load)) for load, _ in first]
    steps += [(chunk(3), true_s(chunk(3)) * rng.uniform(0.9, 2.5)) for _ in range(STEPS_PER_FIT - len(steps))]
    assert prompt_s(learned(steps)) < 5 * true_s(chunk(PROMPT))


def test_steps_that_were_all_alike_are_a_fixed_time() -> None:
    cost = learned([(chunk(3), 6e-3)] * STEPS_PER_FIT)
    assert cost.fixed_s == pytest.approx(6e-3, rel=0.05)
    assert prompt_s(cost) < 2 * 6e-3


def test_what_steps_tell_apart_is_told() -> None:
    rng = Random(0)
    loads = [chunk(rng.randint(16, 2048), decodes=rng.randint(0, 64), decode_kv_tokens=rng.randint(0, 100_000))
             for _ in range(KEPT_STEPS // STEPS_PER_FIT * STEPS_PER_FIT)]  # fmt: skip
    cost = learned((load, true_s(load)) for load in loads)
    assert cost.token_s == pytest.approx(TOKEN_S, rel=0.01)
    assert cost.pair_s == pytest.approx(PAIR_S, rel=0.05)
    for load in loads:
        assert cost.time_s(load) == pytest.approx(true_s(load), rel=0.02)
