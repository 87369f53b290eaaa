"""What predicted TTFT promises: a pure function, so tested without a worker."""

import statistics
from collections import Counter
from contextlib import ExitStack
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.router.fleet_of_states import COST, Fleet, cache, keys, prompt_of, report
from trunkline.block_hash import prompt_hashes, root_hash
from trunkline.v1.worker_pb2 import LoadSample, StepCostModel
from trunkline_router.routing import policy as policy_module
from trunkline_router.routing import route as route_module
from trunkline_router.routing import ttft
from trunkline_router.routing.credit import Credit
from trunkline_router.routing.prefix_index import keys_of
from trunkline_router.routing.route_request import BATCH, INTERACTIVE, STANDARD, PolicyName
from trunkline_router.routing.ttft import FEW_WORKERS, Terms

PROMPT = prompt_of(1024)


def test_the_holder_of_the_longest_prefix_is_chosen() -> None:
    fleet = Fleet(3)
    cache(fleet.workers[1], PROMPT)
    cache(fleet.workers[2], PROMPT[:512])
    assert fleet.chosen(PROMPT) == {"w1"}
    assert fleet.route(PROMPT).plan.matched_tokens == 1008, "one token at least is computed, and hits are whole blocks"


def test_the_cost_is_the_predicted_time_to_the_first_token() -> None:
    (fleet,) = [Fleet(1)]
    report(fleet.workers[0], running=10, running_kv_tokens=50_000, uncached_tokens_by_lane=[0, 4000, 9000])
    cache(fleet.workers[0], PROMPT[:512])
    (candidate,) = fleet.route(PROMPT).plan.candidates
    decoding_s = 10 * 25e-6 + 50_000 * 2e-8
    room = 2048 - 10
    assert candidate.matched_tokens == 512
    assert candidate.queued_tokens == 4000, "what waits in the batch lane comes after it"
    assert candidate.prefill_s == pytest.approx(0.004 + 512 * 25e-6 + 512 * (512 + 256) * 1e-9)
    assert candidate.queue_s == pytest.approx(4000 * 25e-6 + 4000 / room * 0.004)
    assert candidate.decode_s == pytest.approx((1 + 4000 / room) * decoding_s + 0.5 * (0.004 + decoding_s))
    assert (candidate.kv_wait_s, candidate.kv_penalty_s, candidate.slow_start_s) == (0, 0, 0)
    assert candidate.cost_s == pytest.approx(sum(getattr(candidate, name) for name in Terms._fields))


def test_the_predicted_time_of_a_request_with_several_prompts_is_that_of_all() -> None:
    fleet = Fleet(1)
    (worker,) = fleet.workers
    route = fleet.route(PROMPT, beside_prompts=3, beside_tokens=3000)
    (candidate,) = route.plan.candidates
    assert candidate.prefill_s == pytest.approx(2 * 0.004 + 4024 * 25e-6 + (1024 * 512 + 3000 * 500) * 1e-9)
    assert candidate.kv_wait_s == 0
    with route.in_flight():
        assert (worker.queued_tokens, worker.open_choices) == (4024, 1)


@pytest.mark.parametrize(("lane", "chosen"), [(INTERACTIVE, "w1"), (STANDARD, "w1"), (BATCH, "w0")])
def test_only_what_goes_first_counts_as_queued(lane: int, chosen: str) -> None:
    """w1 has much to do for the batch lane, w0 a little for the interactive one."""
    fleet = Fleet(2)
    report(fleet.workers[0], uncached_tokens_by_lane=[3000, 0, 0])
    report(fleet.workers[1], uncached_tokens_by_lane=[0, 0, 20_000])
    assert fleet.chosen(PROMPT, lane=lane) == {chosen}


def test_a_hot_prefix_is_computed_elsewhere_once_waiting_for_its_holder_costs_more() -> None:
    fleet = Fleet(4)
    hot = prompt_of(4096, seed=1)
    cache(fleet.workers[0], hot)
    recomputing_s = min(c.cost_s for c in fleet.route([*hot, 1]).plan.candidates[1:])
    others: list[float] = []
    with ExitStack() as stack:
        for n in range(200):
            route = fleet.route([*hot, *prompt_of(100, seed=n + 2)])
            if route.worker is not fleet.workers[0]:
                others.append(route.plan.candidates[0].cost_s)
                break
            stack.enter_context(route.in_flight())
        assert n > 5, "it is not given up for a short queue"
        assert others, "the holder's queue grows, so another worker takes over"
        assert others[0] == pytest.approx(recomputing_s, rel=0.2)
        # The replica counts at once, although nothing of it is reported: the burst goes on there.
        stack.enter_context(route.in_flight())
        again = fleet.route([*hot, 7])
        assert again.plan.candidates[fleet.workers.index(route.worker)].matched_tokens == 4096


def test_of_near_equals_the_one_with_least_to_compute_is_chosen() -> None:
    """100 tokens are nothing beside a queue of seconds, but no reason to compute them twice either."""
    fleet = Fleet(2)
    for worker in fleet.workers:
        report(worker, running=3, uncached_tokens_by_lane=[0, 50_000, 0])
    cache(fleet.workers[1], PROMPT[:160])
    assert fleet.chosen(PROMPT) == {"w1"}


def test_a_busy_fleet_computes_nothing_twice_for_a_small_gain_and_an_idle_worker_may() -> None:
    """The holder's queue is longer by several times what it holds would take to compute."""
    fleet = Fleet(2)
    cache(fleet.workers[1], PROMPT[:1600])
    report(fleet.workers[1], running=40, uncached_tokens_by_lane=[0, 60_000, 0])
    report(fleet.workers[0], running=40, uncached_tokens_by_lane=[0, 52_000, 0])
    assert fleet.chosen(PROMPT) == {"w1"}
    report(fleet.workers[1], running=40, uncached_tokens_by_lane=[0, 8_000, 0])
    report(fleet.workers[0], running=0, uncached_tokens_by_lane=[0, 0, 0])
    assert fleet.chosen(PROMPT) == {"w0"}


@pytest.mark.parametrize("size", [3, 16])
def test_equal_workers_share_unrelated_requests_evenly(size: int) -> None:
    """Workers report rarely: between two samples it is the router's own credit that spreads a burst."""
    fleet, draw = Fleet(size), Random(5)
    sent: Counter[str] = Counter()
    with ExitStack() as stack:
        for n in range(20 * size):
            route = fleet.route(prompt_of(draw.randrange(100, 3000), seed=n))
            stack.enter_context(route.in_flight())
            sent[route.worker.worker_id] += len(route.request.prompt)
    tokens = [sent[worker.worker_id] for worker in fleet.workers]
    assert statistics.pstdev(tokens) / statistics.mean(tokens) < 0.1


def test_routers_that_know_the_same_do_not_all_choose_the_same() -> None:
    assert {Fleet(8, seed=seed).route(PROMPT).worker.worker_id for seed in range(60)} == {f"w{n}" for n in range(8)}


def test_decodes_that_share_the_steps_count() -> None:
    fleet = Fleet(2)
    report(fleet.workers[0], running=50, running_kv_tokens=400_000)
    report(fleet.workers[1], running=5, running_kv_tokens=10_000)
    assert fleet.chosen(PROMPT) == {"w1"}


def test_a_worker_without_room_for_the_prompt_is_waited_for_and_so_avoided() -> None:
    fleet = Fleet(2)
    cache(fleet.workers[0], PROMPT[:160])
    full: dict[str, Any] = {"running": 20, "running_kv_tokens": 160_000, "kv_live_blocks": 9_990, "kv_free_blocks": 10}
    report(fleet.workers[0], **full)
    report(fleet.workers[1], running=20, running_kv_tokens=160_000, kv_live_blocks=5_000, kv_free_blocks=5_000)
    assert fleet.chosen(PROMPT) == {"w1"}
    assert fleet.route(PROMPT).plan.candidates[0].kv_wait_s > 0
    # A worker that has something waiting says itself how long.
    waits: dict[str, Any] = {"waiting": 4, "waiting_by_lane": [0, 4, 0], "retry_delay_ms_by_lane": [50, 9_000, 9_000]}
    report(fleet.workers[0], **full, **waits)
    standard, interactive = (fleet.route(PROMPT, lane=lane).plan.candidates[0] for lane in (STANDARD, INTERACTIVE))
    assert standard.kv_wait_s == pytest.approx(9.0, rel=0.01)
    assert interactive.kv_wait_s < standard.kv_wait_s


@pytest.mark.parametrize("num_workers", [1, 50])
def test_a_plan_says_whether_the_request_will_wait_for_kv_blocks(num_workers: int) -> None:
    """However many workers are weighed: the two ways to compute it agree."""
    busy: dict[str, Any] = {"running": 20, "running_kv_tokens": 160_000}
    waits: dict[str, bool] = {}
    for name, live in (("full", 9_990), ("roomy", 5_000)):
        fleet = Fleet(num_workers)
        for worker in fleet.workers:
            report(worker, **busy, kv_live_blocks=live, kv_free_blocks=10_000 - live)
        plan = fleet.route(PROMPT).plan
        assert plan.prediction is not None
        waits[name] = plan.prediction.waits_for_kv(plan.chosen)
    assert waits == {"full": True, "roomy": False}


def test_the_penalty_near_a_full_pool_is_convex_and_outweighs_a_short_prefix() -> None:
    fleet = Fleet(1)
    penalties = []
    for live in range(0, 10_001, 500):
        report(fleet.workers[0], running=20, running_kv_tokens=16 * live, kv_live_blocks=live,
               kv_free_blocks=10_000 - live)  # fmt: skip
        penalties.append(fleet.route(PROMPT).plan.candidates[0].kv_penalty_s)
    steps = [later - earlier for earlier, later in pairwise(penalties)]
    assert penalties[:15] == [0.0] * 15
    assert steps == sorted(steps)
    assert steps[-1] > steps[-2] > 0

    fleet = Fleet(2)
    cache(fleet.workers[0], PROMPT[:160])
    report(fleet.workers[0], running=20, running_kv_tokens=100_000, kv_live_blocks=9_000, kv_free_blocks=1_000)
    report(fleet.workers[1], running=20, running_kv_tokens=100_000, kv_live_blocks=5_000, kv_free_blocks=5_000)
    assert fleet.chosen(PROMPT) == {"w1"}


def test_a_worker_without_a_free_place_is_avoided() -> None:
    fleet = Fleet(2)
    cache(fleet.workers[0], PROMPT)
    report(fleet.workers[0], running=64, waiting=16, running_kv_tokens=10_000)
    assert fleet.chosen(PROMPT) == {"w1"}


def test_a_fresh_worker_has_its_full_chance_with_its_share_of_requests() -> None:
    fleet = Fleet(2)
    fleet.workers[0].take_share(0.2)
    count = sum(fleet.route(PROMPT).worker.worker_id == "w0" for _ in range(2000))
    assert count / 2000 == pytest.approx(0.2 / 2, abs=0.03)
    report(fleet.workers[1], uncached_tokens_by_lane=[0, 100_000, 0])
    assert fleet.chosen(PROMPT) == {"w0"}, "it is better than a long queue at any time"
    fleet.workers[0].take_share(1.0)
    report(fleet.workers[1])
    assert fleet.chosen(PROMPT) == {"w0", "w1"}


def test_of_workers_that_came_nearly_together_none_is_held_back() -> None:
    fleet = Fleet(2)
    fleet.workers[0].take_share(0.1)
    fleet.workers[1].take_share(0.2)
    count = sum(fleet.route(PROMPT).worker.worker_id == "w0" for _ in range(2000))
    assert count / 2000 == pytest.approx(0.45, abs=0.04)


def test_a_faster_worker_is_given_more() -> None:
    fleet = Fleet(2)
    fast = StepCostModel(fixed_s=0.002, token_s=12.5e-6, kv_token_s=1e-8, pair_s=5e-10)
    sent: Counter[str] = Counter()
    report(fleet.workers[0], step_cost=fast)
    with ExitStack() as stack:
        for n in range(60):
            route = fleet.route(prompt_of(1000, seed=n))
            stack.enter_context(route.in_flight())
            sent[route.worker.worker_id] += 1
    assert sent["w0"] / sent["w1"] == pytest.approx(2.0, rel=0.2)


def test_a_worker_that_says_nothing_of_its_steps_is_taken_to_be_like_the_others() -> None:
    fleet = Fleet(4)
    for worker, factor in zip(fleet.workers, (1.0, 3.0, 2.0), strict=False):
        report(worker, step_cost=StepCostModel(fixed_s=0.004 * factor, token_s=25e-6 * factor))
    fleet.workers[3].take_load(LoadSample(), 0.0)
    candidates = fleet.route(PROMPT).plan.candidates
    assert candidates[3].cost_s == pytest.approx(candidates[2].cost_s)


def test_a_fleet_without_step_costs_is_routed_by_tokens() -> None:
    fleet = Fleet(3)
    for worker in fleet.workers:
        worker.take_load(LoadSample(running=2), 0.0)
    cache(fleet.workers[1], PROMPT[:512])
    assert fleet.chosen(PROMPT) == {"w1"}
    fleet.workers[1].take_load(LoadSample(running=2, uncached_tokens_by_lane=[1000, 0, 0]), 0.0)
    assert fleet.chosen(PROMPT) == {"w0", "w2"}
    fleet.workers[0].take_load(LoadSample(running=30), 0.0)
    assert fleet.chosen(PROMPT) == {"w2"}


def test_the_reason_says_how_close_it_was() -> None:
    fleet = Fleet(2)
    assert "drawn from 2 workers within" in fleet.route(PROMPT).plan.reason
    cache(fleet.workers[0], PROMPT)
    assert fleet.route(PROMPT).plan.reason.endswith("ms, sooner than anywhere else")


loads = st.builds(
    lambda running, queued, live, cost: LoadSample(
        running=running,
        running_kv_tokens=running * 700,
        uncached_tokens_by_lane=queued,
        kv_live_blocks=live,
        kv_free_blocks=10_000 - live,
        step_cost=COST if cost else None,
    ),
    st.integers(0, 300),
    st.lists(st.integers(0, 200_000), min_size=3, max_size=3),
    st.integers(0, 10_000),
    st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(loads, min_size=1, max_size=8),
    st.sampled_from(PolicyName),
    st.integers(0, 2),
    st.integers(1, 40),
    st.integers(0, 1 << 30),
)
def test_whatever_workers_report_the_plan_is_whole_and_repeats(
    samples: list[LoadSample], policy: PolicyName, lane: int, cached: int, seed: int
) -> None:
    def plan() -> object:
        fleet = Fleet(len(samples), policy=policy, seed=seed)
        for worker, sample in zip(fleet.workers, samples, strict=True):
            worker.take_load(sample, 0.0)
        cache(fleet.workers[-1], PROMPT[: 16 * cached])
        plan = fleet.route(PROMPT, lane=lane, affinity_key="s").plan
        chosen = plan.candidates[plan.chosen]
        assert (chosen.worker_id, chosen.matched_tokens) == (plan.worker_id, plan.matched_tokens)
        assert plan.best(2)[0] == chosen
        assert all(0 <= getattr(c, name) < 1e6 for c in plan.candidates for name in Terms._fields), "finite, never less"
        return plan.candidates, plan.chosen, plan.reason

    assert plan() == plan()


def test_workers_of_different_block_sizes_are_matched_each_by_its_own() -> None:
    fleet = Fleet(20)
    other = Fleet(2, block_size=32)
    mixed = [*fleet.workers[:10], *(type(w)(w.model, type(w.blocks)(fleet.index)) for w in other.workers)]
    fleet.workers[4].blocks.store(keys(PROMPT)[:20])
    mixed[11].blocks.store(keys_of(b"".join(prompt_hashes(root_hash("weights"), PROMPT, 32)))[:12])
    fleet.workers = mixed
    matched = [candidate.matched_tokens for candidate in fleet.route(PROMPT).plan.candidates]
    assert matched == [0, 0, 0, 0, 320, 0, 0, 0, 0, 0, 0, 384]


@pytest.mark.parametrize("holders", [3, 30])
def test_many_holders_are_found_as_few_are(holders: int) -> None:
    fleet = Fleet(70)
    for worker in fleet.workers[5 : 5 + holders]:
        cache(worker, PROMPT[:512])
    matched = [candidate.matched_tokens for candidate in fleet.route(PROMPT).plan.candidates]
    assert matched == [0] * 5 + [512] * holders + [0] * (65 - holders)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(loads, min_size=1, max_size=FEW_WORKERS),
    st.lists(st.tuples(st.integers(0, 64), st.floats(0.0, 1.0), st.integers(0, 50)), min_size=FEW_WORKERS),
    st.sampled_from([PolicyName.PREDICTED_TTFT, PolicyName.SESSION_AFFINITY]),
    st.integers(0, 2),
    st.integers(0, 1 << 30),
)
def test_weighed_one_by_one_or_all_at_once_workers_cost_the_same_to_the_last_bit(
    samples: list[LoadSample], states: list[tuple[int, float, int]], policy: PolicyName, lane: int, seed: int
) -> None:
    def plan(few: int) -> object:
        fleet = Fleet(len(samples), policy=policy, seed=seed)
        for worker, sample, (cached, share, foreign) in zip(fleet.workers, samples, states, strict=False):
            worker.take_load(sample, 0.0)
            worker.take_share(share)
            worker.take_foreign(Credit(foreign, 100 * foreign))
            cache(worker, PROMPT[: 16 * cached])
        with pytest.MonkeyPatch.context() as patch:
            for module in (ttft, policy_module, route_module):
                patch.setattr(module, "FEW_WORKERS", few)
            plan = fleet.route(PROMPT, lane=lane, affinity_key="s").plan
        return plan.candidates, plan.best(FEW_WORKERS), plan.chosen, plan.reason, fleet.rng.random()

    assert plan(0) == plan(FEW_WORKERS)
