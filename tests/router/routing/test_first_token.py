"""Predicted first tokens follow the steps of the worker. A step of the worker here takes 10 ms, and 1 ms more for ten
tokens of prompts, and messages take 4 ms there and back."""

from collections.abc import Iterator

import pytest

from tests.router.fleet_of_states import Fleet, prompt_of, report
from trunkline.v1.worker_pb2 import StepCostModel
from trunkline_router.routing.first_token import MOST_STEPS, PLANNING_LEAD_S
from trunkline_router.routing.route_request import PolicyName
from trunkline_router.routing.step_times import StepTimes

STEP_S, TOKEN_S, DELAY_S = 0.010, 1e-4, 0.004
HEARD_S = 100.0  # when the message of a step arrived
BEGUN_S = HEARD_S - DELAY_S  # what was sent until then has arrived as the next step began
OWN_S = STEP_S + 50 * TOKEN_S + DELAY_S
TRIFLE_S = 1e-4


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    """One worker that decodes a choice of this router, and sent the output of a step at HEARD_S."""
    made = Fleet(1, max_step_tokens=200)
    (worker,) = made.workers
    cost = StepCostModel(fixed_s=STEP_S, token_s=TOKEN_S)
    worker.steps.took(DELAY_S)
    report(worker, step_cost=cost)
    with made.route(prompt_of(20), now_s=0.0).in_flight() as running:
        running.has_started(0)
        report(worker, step_cost=cost, running=1, running_kv_tokens=20)
        worker.steps.ended(HEARD_S)
        yield made


def predicted_s(fleet: Fleet, now_s: float, tokens: int = 50, **fields: object) -> float:
    found = fleet.route(prompt_of(tokens, seed=9), now_s=now_s, **fields).first_token_s()
    assert found is not None
    return found


def near(time_s: float) -> object:
    """The decodes add the time of one or two tokens to each step."""
    return pytest.approx(time_s, abs=6 * TOKEN_S)


@pytest.mark.parametrize("after_s", [0.0, 0.002, 0.005])
def test_the_later_in_a_step_a_request_is_sent_the_sooner_it_has_its_first_token(fleet: Fleet, after_s: float) -> None:
    assert predicted_s(fleet, HEARD_S + after_s) == near(STEP_S - DELAY_S - after_s + OWN_S)


def test_a_request_that_misses_the_plan_of_the_next_step_waits_for_one_more(fleet: Fleet) -> None:
    planned_s = BEGUN_S + STEP_S + TOKEN_S - PLANNING_LEAD_S
    assert predicted_s(fleet, planned_s - TRIFLE_S) == near(PLANNING_LEAD_S + OWN_S)
    assert predicted_s(fleet, planned_s + TRIFLE_S) == near(PLANNING_LEAD_S + STEP_S + OWN_S)


def test_prompts_in_the_step_under_way_lengthen_it_and_later_ones_the_next(fleet: Fleet) -> None:
    """Either way the request waits for them, but what is sent after the short step finds the next one under way."""
    now_s = HEARD_S + 0.008
    alone_s = predicted_s(fleet, now_s)
    with fleet.route(prompt_of(100, seed=1), now_s=BEGUN_S - TRIFLE_S).in_flight():
        assert predicted_s(fleet, now_s) == near(alone_s - STEP_S + 100 * TOKEN_S), "it makes the next step"
    with fleet.route(prompt_of(100, seed=1), now_s=BEGUN_S + TRIFLE_S).in_flight():
        assert predicted_s(fleet, now_s) == near(alone_s + 100 * TOKEN_S)
    assert predicted_s(fleet, now_s) == alone_s


def test_a_prompt_longer_than_a_step_is_followed_over_its_steps(fleet: Fleet) -> None:
    """It takes two steps of 199 tokens and the decode, and a third for the rest."""
    with fleet.route(prompt_of(450, seed=1), now_s=BEGUN_S).in_flight():
        full_s = STEP_S + 200 * TOKEN_S
        rest_s = full_s - DELAY_S + full_s + 52 * TOKEN_S + OWN_S
        assert predicted_s(fleet, HEARD_S) == near(rest_s)
        assert predicted_s(fleet, HEARD_S + full_s) == near(rest_s - full_s), "without a message"
        fleet.workers[0].steps.ended(HEARD_S + full_s)
        assert predicted_s(fleet, HEARD_S + full_s) == near(rest_s - full_s), "with one, which does not tell of it"


def test_a_step_without_prompts_takes_less_if_it_leaves_out_experts(fleet: Fleet) -> None:
    (worker,) = fleet.workers
    alone_s = predicted_s(fleet, HEARD_S)
    cost = StepCostModel(fixed_s=STEP_S, token_s=TOKEN_S)
    report(worker, step_cost=cost, running=1, running_kv_tokens=20, other_experts_s=0.003)
    assert predicted_s(fleet, HEARD_S) == near(alone_s - 0.003)
    with fleet.route(prompt_of(50, seed=1), now_s=BEGUN_S).in_flight():
        assert predicted_s(fleet, HEARD_S) == near(alone_s + 50 * TOKEN_S), "prompts use all of them"


def test_prompts_of_lower_lanes_wait_unless_they_are_computed_already(fleet: Fleet) -> None:
    alone_s = predicted_s(fleet, HEARD_S, lane=0)
    with fleet.route(prompt_of(100, seed=1), now_s=HEARD_S, lane=2).in_flight():
        assert predicted_s(fleet, HEARD_S, lane=0) == near(alone_s)
    with fleet.route(prompt_of(100, seed=1), now_s=BEGUN_S, lane=2).in_flight():
        assert predicted_s(fleet, HEARD_S, lane=0) == near(alone_s + 100 * TOKEN_S)


def test_what_other_routers_sent_is_waited_for(fleet: Fleet) -> None:
    (worker,) = fleet.workers
    alone_s = predicted_s(fleet, HEARD_S)
    cost = StepCostModel(fixed_s=STEP_S, token_s=TOKEN_S)
    report(worker, step_cost=cost, running=1, running_kv_tokens=20, uncached_tokens_by_lane=[0, 100, 0])
    assert predicted_s(fleet, HEARD_S) == near(alone_s + 100 * TOKEN_S)


def test_several_prompts_are_predicted_until_the_last_of_them_is_computed(fleet: Fleet) -> None:
    """50 tokens and 450 take three steps of 199 and the decode."""
    beside = {"beside_prompts": 9, "beside_tokens": 450}
    alone_s = predicted_s(fleet, HEARD_S)
    assert predicted_s(fleet, HEARD_S, **beside) == near(alone_s + 2 * STEP_S + 450 * TOKEN_S)


def test_half_a_step_is_left_if_it_is_not_known_how_far_it_is(fleet: Fleet) -> None:
    (worker,) = fleet.workers
    unknown_s = 1.5 * STEP_S + 50 * TOKEN_S + DELAY_S
    assert predicted_s(fleet, HEARD_S + (MOST_STEPS + 1) * STEP_S) == near(unknown_s)
    worker.steps.begun_s.clear()
    assert predicted_s(fleet, HEARD_S) == near(unknown_s)


def test_an_idle_worker_begins_when_a_request_arrives() -> None:
    fleet = Fleet(1, max_step_tokens=200)
    (worker,) = fleet.workers
    report(worker, step_cost=StepCostModel(fixed_s=STEP_S, token_s=TOKEN_S))
    worker.steps.took(DELAY_S)
    assert predicted_s(fleet, 5.0) == near(OWN_S)
    with fleet.route(prompt_of(100, seed=1), now_s=5.0).in_flight():
        assert predicted_s(fleet, 5.008) == near(STEP_S + 100 * TOKEN_S - 0.008 + OWN_S)


def test_a_policy_that_predicts_nothing_predicts_no_first_token() -> None:
    assert Fleet(1, policy=PolicyName.ROUND_ROBIN).route(prompt_of(50)).first_token_s() is None


def test_the_delay_is_the_mean_of_late_answers_and_one_outlier_hardly_counts() -> None:
    steps = StepTimes()
    steps.ended(1.0)
    assert not steps.begun_s, "the delay is not known yet"
    for _ in range(100):
        steps.took(0.002)
    assert steps.delay_s == pytest.approx(0.002)
    steps.took(10.0)
    assert steps.delay_s == pytest.approx(0.0022)
    for _ in range(100):
        steps.took(0.001)
    assert steps.delay_s == pytest.approx(0.001, rel=0.01)
