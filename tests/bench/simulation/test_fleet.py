"""The simulated fleet: every request ends once, routers and workers agree in the end about cached blocks, and results
do not depend on how the run is driven."""

from dataclasses import replace
from functools import partial
from random import Random

import pytest

from tests.parameters import one_in
from tests.router.integrity import check_index
from trunkline.block_hash import prompt_hashes, root_hash
from trunkline.status import CONTEXT_LENGTH_EXCEEDED, OVERLOADED
from trunkline_bench.simulation.costs.device_profile import PROFILES
from trunkline_bench.simulation.fleet.fleet import Fleet, FleetRun, TtftGoal, simulate
from trunkline_bench.simulation.fleet.ideal import FleetSizedCache, SharedCache, idle_prefill_s
from trunkline_bench.simulation.fleet.router import POLICIES
from trunkline_bench.simulation.fleet.summary import COLUMNS, Summary, row, summary
from trunkline_bench.simulation.traces.trace_request import TraceRequest
from trunkline_bench.simulation.worker.replay import replay
from trunkline_bench.simulation.worker.simulated_worker import FINGERPRINT, WorkerSpec
from trunkline_router.quotas.sync import LEAST_REST_S
from trunkline_router.routing.credit import NO_CREDIT
from trunkline_router.routing.prefix_index import keys_of
from trunkline_worker.scheduler.limits import SchedulerLimits

BLOCK = 16
SPEC = WorkerSpec(PROFILES["h200-8b"], 400, BLOCK, SchedulerLimits(max_step_tokens=512, itl_target_s=0.1))


def conversations(count: int, turns: int, *, gap_s: float = 0.4, seed: int = 0) -> list[TraceRequest]:
    """Conversations: each turn's prompt extends the one before."""
    draw = Random(seed)
    requests = []
    for number in range(count):
        tokens = [draw.randrange(3, 30_000) for _ in range(draw.randrange(40, 400))]
        at_s = draw.random() * 3
        for _ in range(turns):
            prompt = tokens.copy()
            requests.append(
                TraceRequest(at_s, len(prompt), draw.randrange(1, 30), prompt.copy, conversation=str(number))
            )
            tokens += [draw.randrange(3, 30_000) for _ in range(draw.randrange(20, 120))]
            at_s += gap_s * (0.5 + draw.random())
    return sorted(requests, key=lambda request: request.arrival_s)


def same_token(token_id: int, count: int) -> list[int]:
    return [token_id] * count


def figures(run: FleetRun) -> list[tuple[object, ...]]:
    """The outcome of each request. Times are rounded to nanoseconds: the order of sums differs."""
    return [
        (o.worker, o.output_tokens, o.cached_tokens, o.predicted_tokens, round(o.first_token_s or -1, 9),
         round(o.done_s or -1, 9), round(o.predicted_ttft_s or -1, 9))
        for o in run.outcomes
    ]  # fmt: skip


@pytest.mark.parametrize("policy", one_in(3, POLICIES))
def test_every_request_ends_once_and_in_the_end_routers_know_what_workers_hold(policy: str) -> None:
    requests = conversations(30, 4)
    run = simulate(Fleet(3, SPEC, policy, routers=2), requests)
    assert [outcome.output_tokens for outcome in run.outcomes] == [request.output_tokens for request in requests]
    assert all(outcome.done_s is not None and not outcome.refused for outcome in run.outcomes)
    for router in run.routers:
        check_index(router.index)
        assert router.num_open == 0
        assert set(router.credits().values()) == {NO_CREDIT}
        assert [(state.open_choices, state.queued_tokens) for state in router.workers] == [(0, 0)] * 3
        for state, worker in zip(router.workers, run.workers, strict=True):
            held = set(keys_of(b"".join(worker.engine.scheduler.blocks.tree.nodes)))
            known = {key for shard in router.index._shards for key, mask in shard.items() if mask & state.blocks.bit}
            assert known == held
            assert not router.index._expecting[state.blocks.slot]
    for worker in run.workers:
        assert not worker.engine.has_work
        worker.engine.scheduler.blocks.check_integrity([])


def test_the_same_seed_gives_the_same_run() -> None:
    requests = conversations(30, 3)
    fleet = Fleet(4, SPEC, "predicted-ttft", routers=2, seed=7)
    assert figures(simulate(fleet, requests)) == figures(simulate(fleet, requests))
    assert figures(simulate(replace(fleet, seed=8), requests)) != figures(simulate(fleet, requests))


@pytest.mark.parametrize("policy", ["predicted-ttft", "round-robin", "least-load"])
def test_fast_forward_gives_what_stepping_gives(policy: str) -> None:
    requests = conversations(25, 3)
    fleet = Fleet(3, SPEC, policy)
    stepping = simulate(replace(fleet, spec=replace(SPEC, fast_forward=False)), requests)
    assert figures(simulate(fleet, requests)) == figures(stepping)


def test_a_fleet_of_one_worker_without_a_network_is_a_replay() -> None:
    requests = conversations(20, 3)
    run = simulate(Fleet(1, SPEC, "round-robin", network_s=0.0), requests)
    alone = replay(requests, SPEC)
    assert [(o.output_tokens, o.cached_tokens) for o in run.outcomes] == [
        (o.output_tokens, o.cached_tokens) for o in alone.outcomes
    ]
    assert [o.first_token_s for o in run.outcomes] == pytest.approx([o.first_token_s for o in alone.outcomes])


def test_a_request_takes_the_network_both_ways() -> None:
    requests = [TraceRequest(1.0, 5, 2, lambda: [3, 4, 5, 6, 7])]
    near, far = (simulate(Fleet(1, SPEC, "round-robin", network_s=time_s), requests) for time_s in (0.0, 0.25))
    assert far.outcomes[0].ttft_s == pytest.approx((near.outcomes[0].ttft_s or 0.0) + 0.5)


@pytest.mark.parametrize("routers", [1, 3])
def test_nine_of_ten_first_tokens_come_when_they_are_predicted(routers: int) -> None:
    """Of a mixture of experts whose prompts take one step. Half of the step under way, whatever is left of it, would be
    off by 29 %."""
    draw, at_s, requests = Random(1), 0.0, []
    for number in range(600):
        at_s += draw.expovariate(60.0)
        length, output = (1 + int(draw.expovariate(1.0 / mean)) for mean in (600, 150))
        requests.append(TraceRequest(at_s, length, output, partial(same_token, number + 3, length)))
    profile, limits = PROFILES["h200-30b-a3b"], SchedulerLimits(max_step_tokens=4096, itl_target_s=0.1)
    spec = WorkerSpec(profile, 20_000, BLOCK, limits, routing=profile.model.spec.routing)
    run = simulate(Fleet(2, spec, "predicted-ttft", routers=routers), requests, from_s=5.0)
    assert summary(run).ttft_error[1] < 0.15


def test_a_conversation_stays_where_its_prefix_is() -> None:
    requests = conversations(12, 5)
    ours, round_robin = (
        summary(simulate(Fleet(4, SPEC, policy), requests)) for policy in ("predicted-ttft", "round-robin")
    )
    assert ours.hit_rate > 0.95 * ours.ideal_hit_rate
    assert round_robin.hit_rate < 0.6 * ours.hit_rate


def told_and_alone(fleet: Fleet, requests: list[TraceRequest]) -> tuple[Summary, Summary]:
    """Summaries of two runs: routers that exchange credits as in a small fleet, and routers that do not."""
    told, alone = (summary(simulate(replace(fleet, credit_sync_s=sync_s), requests)) for sync_s in (LEAST_REST_S, None))
    return told, alone


def test_routers_that_exchange_credits_do_not_herd_in_a_burst() -> None:
    # From the first requests, workers learn how many tokens fit into a step.
    sent_s = [0.02 * number for number in range(24)] + [1.0 + number * 2e-3 for number in range(120)]
    burst = [TraceRequest(at_s, 400, 4, partial(same_token, n + 3, 400)) for n, at_s in enumerate(sent_s)]
    told, alone = told_and_alone(Fleet(4, SPEC, "predicted-ttft", routers=6), burst)
    assert told.prefill_cv < 0.5 * alone.prefill_cv
    assert told.ttft_s[2] < 0.8 * alone.ttft_s[2]


@pytest.mark.slow
def test_under_lasting_load_first_tokens_come_sooner_if_routers_exchange_credits() -> None:
    draw, at_s = Random(0), 1.0
    requests = []
    for number in range(200):
        at_s += draw.expovariate(44.0)  # per second, nearly the capacity of the workers
        length = draw.randrange(1000, 3000)
        requests.append(TraceRequest(at_s, length, 4, partial(same_token, number + 3, length)))
    fleet = Fleet(4, replace(SPEC, num_blocks=4000), "predicted-ttft", routers=6)
    told, alone = told_and_alone(fleet, requests)
    assert told.ttft_s[1] < 0.9 * alone.ttft_s[1]
    assert told.ttft_s[2] < alone.ttft_s[2]


def test_a_request_that_no_worker_can_hold_is_refused_before_its_prompt_is_made() -> None:
    def never() -> list[int]:
        raise MemoryError("the prompt of a refused request was made")

    requests = [TraceRequest(0.0, 10**9, 3, never), TraceRequest(0.1, 5, 3, lambda: [3] * 5)]
    run = simulate(Fleet(2, SPEC, "least-load"), requests)
    assert [outcome.refused for outcome in run.outcomes] == [CONTEXT_LENGTH_EXCEEDED, ""]
    assert summary(run).refused == 1


def test_a_full_queue_refuses_and_its_credit_comes_back() -> None:
    limits = replace(SPEC.limits, max_waiting_requests=2, max_running_requests=1)
    requests = [TraceRequest(0.0, 300, 5, lambda: [3] * 300) for _ in range(12)]
    run = simulate(Fleet(1, replace(SPEC, limits=limits), "predicted-ttft"), requests)
    assert {outcome.refused for outcome in run.outcomes} == {"", OVERLOADED}
    assert run.routers[0].credits() == {0: NO_CREDIT}


def test_a_run_that_can_no_longer_meet_its_goal_is_given_up() -> None:
    requests = [TraceRequest(n * 0.01, 2000, 5, partial(same_token, n + 3, 2000)) for n in range(800)]
    run = simulate(Fleet(1, SPEC, "round-robin"), requests, goal=TtftGoal(0.5))
    assert run.given_up
    assert any(outcome.done_s is None for outcome in run.outcomes)
    assert not simulate(Fleet(1, SPEC, "round-robin"), requests[:3], goal=TtftGoal(60.0)).given_up


def test_only_what_arrives_after_the_ramp_counts() -> None:
    requests = conversations(10, 4)
    run = simulate(Fleet(2, SPEC, "predicted-ttft"), requests, from_s=2.0)
    told = summary(run)
    assert told.requests == sum(request.arrival_s >= 2.0 for request in requests)
    assert len(row(told)) == len(COLUMNS)
    assert told.to_json()["requests"] == told.requests


def test_the_ideal_cache_keeps_every_block_and_the_bounded_one_evicts() -> None:
    def chain(tokens: list[int]) -> list[int]:
        return keys_of(b"".join(prompt_hashes(root_hash(FINGERPRINT), tokens, BLOCK)))

    first, other = list(range(3, 3 + 4 * BLOCK)), list(range(900, 900 + 4 * BLOCK))
    ideal, bounded = SharedCache(), FleetSizedCache(6)
    for tokens, expected, fitting in ((first, 0, 0), (first, 3, 3), (other, 0, 0), (first, 3, 2), (first[:40], 2, 2)):
        assert ideal.take(chain(tokens), len(tokens), BLOCK) == expected * BLOCK
        assert bounded.take(chain(tokens), len(tokens), BLOCK) == fitting * BLOCK


def test_an_idle_worker_needs_for_a_prompt_what_the_simulated_engine_takes() -> None:
    # From the first requests, the worker learns how many tokens fit into a step.
    prompts = [[number, *range(3, 1202)] for number in (3, 4, 5)]
    run = replay([TraceRequest(float(n), 1200, 1, prompt.copy) for n, prompt in enumerate(prompts)], SPEC)
    expected_s = idle_prefill_s(SPEC.cost, 1200, 0, SPEC.limits.max_step_tokens)
    first_token_s = run.outcomes[-1].first_token_s
    assert first_token_s is not None
    assert first_token_s - 2.0 == pytest.approx(expected_s)
