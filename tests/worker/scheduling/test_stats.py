"""The numbers of the engine, and the parts that learn from them."""

import random

import numpy as np
import pytest

from trunkline_worker.scheduler.admission import SAFETY_DEVIATIONS, OutputLengths, peak_blocks
from trunkline_worker.scheduler.deadlines import UNKNOWN_RETRY_S, DrainRate
from trunkline_worker.scheduler.stats import Histogram
from trunkline_worker.scheduler.step_cost import STEPS_PER_FIT, StepCost, StepLoad, chunk_pairs
from trunkline_worker.step.lanes import Lane, QueueBounds


def test_quantiles_are_within_half_a_bucket_and_forget_what_is_old() -> None:
    histogram = Histogram()
    draw = random.Random(0)
    values = [draw.uniform(0.001, 2.0) for _ in range(5000)]
    for value in values:
        histogram.add(value)
    for share, found in zip((0.5, 0.9, 0.99), histogram.quantiles(0.5, 0.9, 0.99), strict=True):
        assert found == pytest.approx(sorted(values)[int(share * 5000)], rel=0.04)
    histogram.turn_window()
    histogram.turn_window()
    histogram.add(10.0, 3)
    assert histogram.quantiles(0.5)[0] == pytest.approx(10.0, rel=0.03)
    assert histogram.count == 5003
    assert histogram.sum == pytest.approx(sum(values) + 30)
    assert Histogram().quantiles(0.5) == [0.0]


def test_remaining_lengths_follow_from_sequences_that_became_as_long() -> None:
    lengths = OutputLengths()
    for n in range(2000):
        lengths.observe(10 if n % 2 else 400)
    mean, variance = lengths.remaining(np.array([0, 50, 390]))
    assert mean[0] == pytest.approx(205, rel=0.15)
    assert mean[1] == pytest.approx(350, rel=0.1), "a sequence with 50 is one of the long ones"
    assert 1 <= mean[2] <= 80
    assert variance[0] > 10 * variance[1]


def test_the_forecast_peak_is_where_most_is_held_before_a_sequence_ends() -> None:
    exact = np.zeros(2)
    # Two sequences of 4 blocks: one ends after 8 tokens, the other after 80.
    peak = peak_blocks(np.array([4, 4]), np.array([8.0, 80.0]), exact, shared=3, block_size=8)
    assert peak == 3 + max(4 + 4 + 2 * 1.5, 4 + 10.5)
    wider = peak_blocks(np.array([4, 4]), np.array([8.0, 80.0]), np.array([0.0, 64.0]), shared=3, block_size=8)
    assert wider == pytest.approx(peak + SAFETY_DEVIATIONS * 8 / 8)


def test_step_costs_are_learned_and_size_chunks() -> None:
    cost, draw = StepCost(), random.Random(0)
    for _ in range(4 * STEPS_PER_FIT):
        tokens, before, kv = draw.randrange(16, 2000), draw.randrange(0, 4000), draw.randrange(0, 100_000)
        load = StepLoad(tokens, kv, chunk_pairs(tokens, before))
        cost.observe(load, 0.002 + 20e-6 * tokens + 3e-8 * kv + 2e-9 * load.chunk_pairs)
    assert cost.fixed_s == pytest.approx(0.002, rel=0.05)
    assert cost.token_s == pytest.approx(20e-6, rel=0.05)
    for before in (0, 5000):
        longest = cost.longest_chunk(0.03, before)
        assert cost.chunk_s(longest, before) <= 0.03 < cost.chunk_s(longest + 2, before)


def test_a_retry_hint_is_the_time_in_which_as_many_were_admitted() -> None:
    rate = DrainRate()
    assert rate.retry_delay_s(Lane.BATCH, [0, 0, 5], 0.0) == UNKNOWN_RETRY_S
    rate.step_over([0, 0, 500], 0.0)
    for n in range(100):
        rate.admitted(Lane.BATCH, n * 0.5)
        rate.step_over([0, 0, 499 - n], n * 0.5)
    assert rate.retry_delay_s(Lane.BATCH, [0, 0, 20], 49.5) == pytest.approx(9.5)
    assert rate.retry_delay_s(Lane.BATCH, [0, 0, 400], 49.5) == pytest.approx(198)
    assert rate.retry_delay_s(Lane.INTERACTIVE, [0, 0, 400], 49.5) == pytest.approx(0.05), "no sequence is before it"


def test_time_in_which_nothing_waited_is_not_counted() -> None:
    rate = DrainRate()
    rate.step_over([0, 9, 0], 0.0)
    for n in range(9):
        rate.admitted(Lane.STANDARD, 1.0 + n)
        rate.step_over([0, 8 - n, 0], 1.0 + n)
    # An hour later, some are let in at once, and the rest waits.
    for _ in range(50):
        rate.admitted(Lane.STANDARD, 3600.0)
    assert not rate.is_queueing(Lane.STANDARD)
    rate.step_over([0, 4, 0], 3600.0)
    assert rate.is_queueing(Lane.STANDARD)
    assert rate.is_queueing(Lane.BATCH), "what waits above it goes first"
    assert not rate.is_queueing(Lane.INTERACTIVE)
    assert rate.retry_delay_s(Lane.STANDARD, [0, 4, 0], 3600.5) == pytest.approx(3.5)


def test_a_full_queue_still_admits_a_tenant_below_its_share() -> None:
    bounds = QueueBounds(max_requests=10, max_tokens=1000)

    def admits(lane: Lane, waiting: list[int], of_tenant: int, share: float, tokens: int = 1, own: int = 0) -> bool:
        return bounds.admits(
            lane, tokens, waiting=waiting, waiting_tokens=[n * 10 for n in waiting], of_tenant=of_tenant,
            tokens_of_tenant=own, share=share,
        )  # fmt: skip

    assert admits(Lane.STANDARD, [0, 9, 0], 9, 1.0)
    assert not admits(Lane.STANDARD, [0, 10, 0], 10, 1.0)
    assert admits(Lane.STANDARD, [0, 10, 0], 2, 0.5)
    assert not admits(Lane.STANDARD, [0, 10, 0], 5, 0.5)
    assert not admits(Lane.STANDARD, [0, 20, 0], 0, 0.5), "twice the bound is the end"
    assert admits(Lane.STANDARD, [0, 10, 0], 2, 0.5, tokens=100, own=400)
    assert not admits(Lane.STANDARD, [0, 10, 0], 2, 0.5, tokens=101, own=400), "a share of the tokens too"
    assert admits(Lane.STANDARD, [0, 10, 0], 0, 0.01), "the first one of a tenant, however many tenants there are"
    assert admits(Lane.INTERACTIVE, [0, 0, 500], 0, 1.0), "lower lanes do not fill a higher one"
    assert not admits(Lane.BATCH, [5, 5, 0], 0, 1.0), "higher lanes fill a lower one"
    assert admits(Lane.STANDARD, [0, 0, 0], 0, 1.0, tokens=5000), "alone, even the longest may wait"
    assert not admits(Lane.STANDARD, [0, 1, 0], 1, 1.0, tokens=5000)
