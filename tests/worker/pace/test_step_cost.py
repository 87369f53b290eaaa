"""The learned cost of a step: no prompt is predicted to take many times its real time, for any mix of steps."""

from collections.abc import Iterable
from random import Random
from statistics import median
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trunkline_kernels.routing_rule import RoutingRule
from trunkline_worker.scheduler.limits import SchedulerLimits
from trunkline_worker.scheduler.step_budget import StepBudget
from trunkline_worker.scheduler.step_cost import (
    DECODE_SAMPLE_EVERY,
    FIRST_STEPS,
    KEPT_STEPS,
    MOST_LATE_TIMES,
    MOST_LATENESS,
    MOST_PAIR_SHARE,
    STEPS_PER_FIT,
    StepCost,
    StepLoad,
    chunk_pairs,
)

FIXED_S, TOKEN_S, KV_TOKEN_S, PAIR_S = 5e-3, 3e-4, 1e-7, 2e-7
PROMPT = 512


class Device(NamedTuple):
    """A device's step times, and the steps it is given."""

    fixed_s: float
    token_s: float
    kv_token_s: float
    pair_s: float
    context: int
    decodes: int
    chunk: int

    def time_s(self, load: StepLoad) -> float:
        return (
            self.fixed_s
            + self.token_s * load.num_tokens
            + self.kv_token_s * load.decode_kv_tokens
            + self.pair_s * load.chunk_pairs
        )


DEVICES = {
    "h200-8b": Device(6e-3, 2e-5, 3e-8, 2e-10, context=4000, decodes=32, chunk=512),
    "cpu": Device(1e-2, 5e-4, 1e-7, 1e-7, context=1000, decodes=4, chunk=256),
    "cpu-tiny": Device(5e-4, 1e-4, 2e-8, 1e-8, context=500, decodes=2, chunk=512),
    "cpu-compute-bound": Device(5e-4, 2e-3, 1e-6, 1e-6, context=200, decodes=1, chunk=128),
}


def chunk(num_tokens: int, *, decodes: int = 0, decode_kv_tokens: int = 0) -> StepLoad:
    return StepLoad(num_tokens + decodes, decode_kv_tokens, chunk_pairs(num_tokens, 0))


def true_s(load: StepLoad) -> float:
    return FIXED_S + TOKEN_S * load.num_tokens + KV_TOKEN_S * load.decode_kv_tokens + PAIR_S * load.chunk_pairs


def learned(steps: Iterable[tuple[StepLoad, float]], routing: RoutingRule | None = None) -> StepCost:
    cost = StepCost()
    cost.routing = routing
    for load, time_s in steps:
        cost.observe(load, time_s)
    assert cost.is_known
    return cost


def prompt_s(cost: StepCost, num_tokens: int = PROMPT) -> float:
    return cost.fixed_s + cost.chunk_s(num_tokens, 0)


def life(device: Device, num_chunks: int, seed: int) -> StepCost:
    """Many decodes and a few chunks between them; times are 3 % apart."""
    rng = Random(seed)
    steps = []
    total = KEPT_STEPS * DECODE_SAMPLE_EVERY
    for number in range(total):
        decodes = rng.randint(1, device.decodes)
        steps.append(StepLoad(decodes, decodes * rng.randint(device.context // 2, device.context), 0.0))
        if number % (total // num_chunks) == 0:
            steps.append(chunk(rng.randint(device.chunk // 4, device.chunk), decodes=decodes))
    steps += (
        [StepLoad(1, device.context, 0.0)] * STEPS_PER_FIT * DECODE_SAMPLE_EVERY
    )  # enough for a fit, however few prompts there are
    return learned((load, device.time_s(load) * rng.gauss(1, 0.03)) for load in steps)


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize(("num_chunks", "least", "most"), [(2, 0.7, 1.3), (8, 0.85, 1.15), (32, 0.9, 1.1)])
def test_a_few_prompts_among_many_decodes_tell_what_prompts_cost(
    device: Device, num_chunks: int, least: float, most: float
) -> None:
    fits = [life(device, num_chunks, seed) for seed in range(9)]
    for times, low, high in ((1, least, most), (4, 0.6, 1.5)):
        true = device.time_s(chunk(times * device.chunk))
        ratios = [prompt_s(fit, times * device.chunk) / true for fit in fits]
        assert low < median(ratios) < high
        assert 0.5 < min(ratios) <= max(ratios) < 2, "nor is any life far off"


@pytest.mark.parametrize("slower", [5.0, 20.0, 100.0])
@pytest.mark.parametrize("seed", range(5))
def test_first_steps_that_are_slow_and_then_all_alike_do_not_make_prompts_slow(seed: int, slower: float) -> None:
    rng = Random(seed)
    first = [chunk(rng.randint(9, 30), decodes=2, decode_kv_tokens=40) for _ in range(3)]
    steps = [(load, slower * true_s(load)) for load in first]
    steps += [(chunk(3), true_s(chunk(3)) * rng.uniform(0.9, 2.5)) for _ in range(STEPS_PER_FIT - len(steps))]
    cost = learned(steps)
    assert prompt_s(cost) < 5 * true_s(chunk(PROMPT))
    assert prompt_s(cost, 33) < 2 * true_s(chunk(33))


@pytest.mark.parametrize("num_tokens", [1, 3, 30, 500, 8000])
def test_steps_that_were_all_alike_are_fitted_and_a_prompt_is_taken_to_be_cheap(num_tokens: int) -> None:
    cost = learned([(chunk(num_tokens), 6e-3)] * STEPS_PER_FIT)
    assert prompt_s(cost, num_tokens) == pytest.approx(6e-3, rel=0.01)
    assert prompt_s(cost) == pytest.approx(6e-3 * (512 + PROMPT) / (512 + num_tokens), rel=0.01)


def test_noise_in_steps_of_a_few_tokens_says_nothing_of_prompts() -> None:
    for seed in range(20):
        rng = Random(seed)
        loads = [chunk(rng.randint(3, 4)) for _ in range(STEPS_PER_FIT)]
        cost = learned((load, 6e-3 * rng.uniform(0.8, 1.6)) for load in loads)
        assert prompt_s(cost) < 4 * 6e-3


def test_costs_that_steps_tell_apart_are_fitted() -> None:
    rng = Random(0)
    loads = [chunk(rng.randint(16, 2048), decodes=rng.randint(0, 64), decode_kv_tokens=rng.randint(0, 100_000))
             for _ in range(KEPT_STEPS // STEPS_PER_FIT * STEPS_PER_FIT)]  # fmt: skip
    cost = learned((load, true_s(load)) for load in loads)
    assert cost.token_s == pytest.approx(TOKEN_S, rel=0.01)
    assert cost.pair_s == pytest.approx(PAIR_S, rel=0.05)
    for load in loads:
        assert cost.time_s(load) == pytest.approx(true_s(load), rel=0.02)


def noisy_decodes(seed: int, *, noise: float, delayed: float) -> StepCost:
    """Learned from decodes of 1 to 128 rows whose times vary in both directions, and of which a share take three times
    as long."""
    rng = Random(seed)
    steps = []
    for _ in range(KEPT_STEPS * DECODE_SAMPLE_EVERY):
        count = 2 ** rng.randint(0, 7)
        load = StepLoad(count, 0, 0.0, count)
        steps.append((load, true_s(load) * rng.lognormvariate(0, noise) * (3 if rng.random() < delayed else 1)))
    return learned(steps)


@pytest.mark.parametrize(("noise", "delayed"), [(0.02, 0.05), (0.15, 0.0), (0.15, 0.05), (0.3, 0.0)])
def test_noise_makes_steps_seem_neither_long_nor_short(noise: float, delayed: float) -> None:
    costs = [noisy_decodes(seed, noise=noise, delayed=delayed) for seed in range(20)]
    for count in (1, 8, 64, 128):
        load = StepLoad(count, 0, 0.0, count)
        assert median(cost.time_s(load) / true_s(load) for cost in costs) == pytest.approx(1, abs=0.04), f"{count} rows"


@pytest.mark.parametrize(("share", "slower"), [(0.7, 3.0), (0.7, 20.0), (0.9, 20.0)])
def test_the_cost_follows_slow_steps_that_are_more_than_fast_ones(share: float, slower: float) -> None:
    def life_with(seed: int) -> StepCost:
        rng = Random(seed)
        loads = [StepLoad(rng.choice((1, 8, 64)), 0, 0.0) for _ in range(2 * KEPT_STEPS * DECODE_SAMPLE_EVERY)]
        return learned((load, true_s(load) * (slower if rng.random() < share else 1)) for load in loads)

    costs = [life_with(seed) for seed in range(9)]
    for count in (1, 8, 64):
        load = StepLoad(count, 0, 0.0)
        ratios = [cost.time_s(load) / (slower * true_s(load)) for cost in costs]
        assert median(ratios) == pytest.approx(1, abs=0.15), f"{count} rows"
        assert min(ratios) > 0.5, f"{count} rows: nor does any life follow the fast ones"


def test_prompts_from_before_a_device_became_faster_do_not_slow_decodes_down() -> None:
    rng = Random(0)
    steps = [(load, 1.4 * true_s(load)) for load in (chunk(rng.randint(2, 64)) for _ in range(KEPT_STEPS))]
    decodes = [StepLoad(rng.choice((1, 8, 64)), 0, 0.0, 0) for _ in range(2 * KEPT_STEPS * DECODE_SAMPLE_EVERY)]
    cost = learned([*steps, *((load, true_s(load) * rng.gauss(1, 0.03)) for load in decodes)])
    for count in (1, 8, 64):
        load = StepLoad(count, 0, 0.0, count)
        assert cost.time_s(load) == pytest.approx(true_s(load), rel=0.06), f"{count} rows"


def test_what_a_prompt_costs_is_not_forgotten_while_there_are_none() -> None:
    device = DEVICES["cpu"]
    decodes = [StepLoad(4, 4000, 0.0, 4)] * (20 * KEPT_STEPS * DECODE_SAMPLE_EVERY)
    cost = learned(
        (load, device.time_s(load)) for load in [*decodes[:FIRST_STEPS], *map(chunk, (64, 256, 256)), *decodes]
    )
    assert prompt_s(cost, 256) == pytest.approx(device.time_s(chunk(256)), rel=0.1)


def test_a_worker_that_took_prompts_for_cheap_learns_better_from_the_first_ones() -> None:
    device = DEVICES["cpu-compute-bound"]
    alike, prompt = StepLoad(1, 100, 0.0), chunk(device.chunk)
    steps = [(alike, device.time_s(alike))] * STEPS_PER_FIT * DECODE_SAMPLE_EVERY
    assert prompt_s(learned(steps), device.chunk) < 0.1 * device.time_s(prompt)
    steps += [(prompt, device.time_s(prompt)), *[(alike, device.time_s(alike))] * STEPS_PER_FIT * DECODE_SAMPLE_EVERY]
    assert prompt_s(learned(steps), device.chunk) == pytest.approx(device.time_s(prompt), rel=0.1)


EXPERTS = RoutingRule(128, 8)
EXPERTS_S = 30e-3  # to read all experts


def with_experts_s(load: StepLoad) -> float:
    """The device that reads only the experts that it needs: a token costs little more once all are in use."""
    return FIXED_S + TOKEN_S / 10 * load.num_tokens + EXPERTS_S * EXPERTS.used_share(load.num_tokens)


def decodes_of(counts: Iterable[int], seed: int) -> list[tuple[StepLoad, float]]:
    rng = Random(seed)
    loads = [StepLoad(count, 0, 0.0, count) for count in counts]
    return [(load, with_experts_s(load) * rng.gauss(1, 0.03)) for load in loads]


@pytest.mark.parametrize("seed", range(5))
def test_steps_that_use_few_or_most_experts_are_predicted_within_a_tenth(seed: int) -> None:
    rng = Random(seed)
    counts = [round(128 ** rng.random()) for _ in range(KEPT_STEPS * DECODE_SAMPLE_EVERY)]
    cost = learned(decodes_of(counts, seed), EXPERTS)
    for count in range(1, 129):
        load = StepLoad(count, 0, 0.0, count)
        assert cost.time_s(load) == pytest.approx(with_experts_s(load), rel=0.1), f"{count} rows"
    linear = learned(decodes_of(counts, seed))
    errors = [linear.time_s(load) / with_experts_s(load) for load in (StepLoad(n, 0, 0.0, n) for n in (1, 128))]
    assert max(abs(error - 1) for error in errors) > 0.3, "a cost of each token alone does not explain such steps"


@pytest.mark.parametrize("seed", range(5))
def test_a_few_decodes_that_each_use_other_experts_do_not_make_prompts_dear(seed: int) -> None:
    rng = Random(seed)
    counts = [rng.randint(1, 4) for _ in range(KEPT_STEPS * DECODE_SAMPLE_EVERY)]
    cost = learned(decodes_of(counts, seed), EXPERTS)
    for tokens in (64, PROMPT, 4 * PROMPT):
        assert cost.full_fixed_s + cost.chunk_s(tokens, 0) < 2.5 * with_experts_s(chunk(tokens))


def test_a_chunk_beside_few_decodes_leaves_time_for_the_experts_that_it_uses() -> None:
    counts = [round(128 ** (number % 50 / 49)) for number in range(KEPT_STEPS * DECODE_SAMPLE_EVERY)]
    steps = [(load, with_experts_s(load)) for load in map(chunk, (16, 64, 256, 1024, 2048) * 20)]
    cost = learned([*decodes_of(counts, 0), *steps], EXPERTS)
    target_s = 60e-3
    budget = StepBudget(SchedulerLimits(itl_target_s=target_s), cost)
    budget.num_decode = 2
    budget.decodes_are_in()
    tokens = cost.longest_chunk(budget._time_left_s or 0.0, 0)
    step = chunk(tokens, decodes=2)
    assert 0.75 * target_s < with_experts_s(step) < 1.05 * target_s


def test_prompts_with_log_probabilities_have_a_cost_of_their_own() -> None:
    rng, scored_token_s = Random(0), 5 * TOKEN_S
    steps = []
    for number in range(KEPT_STEPS):
        load = chunk(rng.randint(16, 512), decodes=rng.randint(0, 8), decode_kv_tokens=rng.randint(0, 4000))
        num_scored = rng.randint(16, load.num_tokens) if number % 4 == 0 else 0
        steps.append((load._replace(num_scored=num_scored), true_s(load) + scored_token_s * num_scored))
    cost = learned(steps)
    assert cost.token_s == pytest.approx(TOKEN_S, rel=0.02)
    assert cost.scored_token_s == pytest.approx(scored_token_s, rel=0.02)
    for is_scored in (False, True):
        longest = cost.longest_chunk(0.05, 0, is_scored=is_scored)
        assert cost.chunk_s(longest, 0, is_scored=is_scored) <= 0.05
        assert cost.chunk_s(longest + 1, 0, is_scored=is_scored) > 0.05


@pytest.mark.parametrize(("noise", "times"), [(0.0, 1.0), (0.1, 1.06), (0.3, 1.17), (3.0, MOST_LATE_TIMES)])
def test_steps_with_prompts_are_planned_to_be_late_one_time_in_ten(noise: float, times: float) -> None:
    rng = Random(0)
    loads = [chunk(rng.randint(16, 2048), decodes=rng.randint(0, 8)) for _ in range(KEPT_STEPS)]
    cost = learned((load, true_s(load) * rng.uniform(1 - noise / 2, 1 + noise)) for load in loads)
    assert cost.late_times == pytest.approx(times, abs=0.05)
    planned_s = cost.within_s(0.1)
    load = chunk(cost.longest_chunk(planned_s - cost.fixed_s, 0))
    late = sum(true_s(load) * rng.uniform(1 - noise / 2, 1 + noise) > 0.1 for _ in range(1000))
    if times < MOST_LATE_TIMES:
        assert late < 200, "of a thousand"


def test_a_step_leaves_the_engine_its_time_between_steps() -> None:
    cost = learned([(chunk(30), true_s(chunk(30)))] * STEPS_PER_FIT)
    assert cost.within_s(0.1) == pytest.approx(0.1)
    for _ in range(100):
        cost.waited(0.02)
    assert cost.within_s(0.1) == pytest.approx(0.08, rel=0.01)
    for _ in range(100):
        cost.waited(0.09)
    assert cost.within_s(0.1) == pytest.approx(0.05), "steps get at least half of the interval"


chunk_loads = st.builds(
    chunk, st.integers(2, 8192), decodes=st.integers(0, 256), decode_kv_tokens=st.integers(0, 10**7)
)
decode_loads = st.builds(StepLoad, st.integers(1, 256), st.integers(1, 10**7), st.just(0.0))


@pytest.mark.parametrize(("step_s", "every"), [(1e-3, DECODE_SAMPLE_EVERY), (0.02, 5), (0.2, 1)])
def test_slow_steps_are_learned_from_as_soon_as_fast_ones(step_s: float, every: int) -> None:
    cost, steps = StepCost(), 0
    while not cost.is_known:
        cost.observe(StepLoad(4, 400, 0.0), step_s)
        steps += 1
    assert steps == (STEPS_PER_FIT - 1) * every + 1


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(chunk_loads | decode_loads, st.floats(1e-5, 1e2)), min_size=1, max_size=30), st.data())
def test_whatever_steps_were_like_no_cost_is_negative_and_no_prompt_dearer_than_any_step_by_far(
    kinds: list[tuple[StepLoad, float]], data: st.DataObject
) -> None:
    rng = data.draw(st.randoms(use_true_random=False))
    cost, observed = StepCost(), []
    while not cost.is_known:
        load, time_s = rng.choice(kinds)
        time_s *= rng.uniform(0.8, 1.5)
        observed.append((load, time_s))
        cost.observe(load, time_s)
        assert len(observed) < FIRST_STEPS + STEPS_PER_FIT * DECODE_SAMPLE_EVERY + 1
    costs = (cost.fixed_s, cost.token_s, cost.kv_token_s, cost.pair_s)
    assert min(costs) >= 0
    assert max(costs) < float("inf")
    dearest_s = max(time_s for _, time_s in observed)
    dearest_token_s = max(time_s / load.num_tokens for load, time_s in observed)
    assert cost.fixed_s <= 2 * dearest_s
    assert cost.token_s <= 2 * dearest_token_s
    assert cost.pair_s <= MOST_PAIR_SHARE * cost.token_s * (1 + 1e-9)
    most_token_s = 2 * dearest_token_s * (1 + MOST_PAIR_SHARE * PROMPT / 2)
    assert cost.chunk_s(PROMPT, 0) <= PROMPT * most_token_s


def test_short_steps_hardly_show_that_long_ones_would_be_in_time() -> None:
    cost, device = StepCost(), DEVICES["h200-8b"]
    for load in [chunk(256), chunk(2048)] * STEPS_PER_FIT:
        cost.observe(load, device.time_s(load))
    cost.recent_lateness = 3.0
    for _ in range(8):
        cost.observe(chunk(2), 0.0005)
    assert cost.recent_lateness > 2.5
    for _ in range(8):
        cost.observe(chunk(2048), device.time_s(chunk(2048)))
    assert cost.recent_lateness < 1.1


def test_a_fit_that_is_deferred_waits_for_its_call_or_for_the_next_one() -> None:
    cost, fits = StepCost(), list[int]()
    cost.defers_fits = True
    for step in range(5 * STEPS_PER_FIT):
        if step == 3 * STEPS_PER_FIT + 10 and cost.is_fit_due:
            cost.fit()
        cost.observe(chunk(64 + step % 7), 0.01)
        if cost.num_fits > len(fits):
            fits.append(step + 1)
    assert fits == [STEPS_PER_FIT, 3 * STEPS_PER_FIT, 5 * STEPS_PER_FIT]
    assert not cost.is_fit_due


def test_steps_after_a_late_one_are_as_much_shorter_until_others_are_in_time() -> None:
    """What made it late may last, and the next fit may be seconds away."""
    cost, device = StepCost(), DEVICES["h200-8b"]
    loads = [chunk(256), chunk(2048)] * STEPS_PER_FIT
    for load in loads:
        cost.observe(load, device.time_s(load))
    assert cost.prompts_within_s(0.1) == pytest.approx(0.1, rel=0.01)
    cost.observe(chunk(2048), 4 * device.time_s(chunk(2048)))
    assert 0.025 <= cost.prompts_within_s(0.1) <= 0.05
    assert cost.within_s(0.1) == pytest.approx(0.1, rel=0.01), "what may run together does not change"
    cost.observe(chunk(2048), 1.5 * device.time_s(chunk(2048)))
    assert 0.04 <= cost.prompts_within_s(0.1) <= 0.07
    cost.observe(chunk(2048), 60.0)
    assert cost.prompts_within_s(0.1) >= 0.1 / MOST_LATENESS - 1e-3
    for _ in range(12):
        cost.observe(chunk(2048), device.time_s(chunk(2048)))
    assert cost.prompts_within_s(0.1) >= 0.09
