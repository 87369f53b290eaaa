"""Each decision for a worker has a reason from a fixed list, which metrics count."""

import pytest

from tests.router.fleet_of_states import Fleet, cache, prompt_of, report
from trunkline_router.routing.policy import Why
from trunkline_router.routing.route_request import PolicyName

PROMPT = prompt_of(400)


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        (PolicyName.PREDICTED_TTFT, Why.DRAWN),
        (PolicyName.LEAST_LOAD, Why.LEAST_LOAD),
        (PolicyName.ROUND_ROBIN, Why.IN_TURN),
        (PolicyName.CONSISTENT_HASH, Why.HASHED),
        (PolicyName.SESSION_AFFINITY, Why.NO_SESSION),
    ],
)
def test_each_policy_tells_its_reason(policy: PolicyName, why: Why) -> None:
    assert Fleet(2, policy=policy).route(PROMPT).plan.why is why


def test_a_cached_prefix_is_told_from_a_free_worker() -> None:
    fleet = Fleet(2)
    cache(fleet.workers[0], prompt_of(64))
    assert fleet.route(prompt_of(64)).plan.why is Why.MOST_CACHED
    report(fleet.workers[1], uncached_tokens_by_lane=[50_000, 0, 0], waiting=9)
    assert fleet.route(PROMPT).plan.why is Why.SOONEST


def test_a_session_tells_why_it_moves() -> None:
    fleet = Fleet(4, policy=PolicyName.SESSION_AFFINITY)

    def why() -> Why:
        return fleet.route(PROMPT, affinity_key="s").plan.why

    assert why() is Why.SESSION_NEW
    fleet.policy.has_sent("s", "w0")
    assert why() is Why.SESSION
    report(fleet.workers[0], running=60)
    assert why() is Why.SESSION_FULL
    del fleet.workers[0]
    assert why() is Why.SESSION_GONE
