"""What each of the other policies promises."""

from collections import Counter
from contextlib import ExitStack

import pytest

from tests.router.fleet_of_states import Fleet, cache, prompt_of, report
from trunkline_router.routing.route_request import MOST_AFFINITY_KEYS, PolicyName, RoutingPolicy

PROMPT = prompt_of(1024)


def test_least_load_takes_who_has_the_fewest_choices_whatever_is_cached() -> None:
    fleet = Fleet(3, policy=PolicyName.LEAST_LOAD)
    cache(fleet.workers[0], PROMPT)
    report(fleet.workers[0], running=2, waiting=1)
    report(fleet.workers[1], running=2)
    report(fleet.workers[2], running=2, uncached_tokens_by_lane=[0, 90_000, 0])
    assert fleet.chosen(PROMPT) == {"w1", "w2"}
    with fleet.route(PROMPT, choices=4).in_flight() as _:
        assert len(fleet.chosen(PROMPT)) == 1


def test_round_robin_takes_turns_as_requests_are_sent() -> None:
    fleet = Fleet(3, policy=PolicyName.ROUND_ROBIN)
    chosen = []
    for _ in range(7):
        assert len(fleet.chosen(PROMPT, times=3)) == 1, "asking is not sending"
        with (route := fleet.route(PROMPT)).in_flight():
            chosen.append(route.worker.worker_id)
    assert chosen == ["w0", "w1", "w2", "w0", "w1", "w2", "w0"]


def places(fleet: Fleet, prompts: range) -> dict[int, str]:
    return {n: fleet.route(prompt_of(400, seed=n)).worker.worker_id for n in prompts}


def test_consistent_hash_keeps_prompts_that_begin_alike_together_and_moves_few_when_a_worker_leaves() -> None:
    fleet = Fleet(8, policy=PolicyName.CONSISTENT_HASH)
    begins = prompt_of(256, seed=1)
    assert len({fleet.route([*begins, *prompt_of(50, seed=n)]).worker.worker_id for n in range(20)}) == 1
    before = places(fleet, range(400))
    assert min(Counter(before.values()).values()) > 25, "and others apart"
    assert places(Fleet(8, policy=PolicyName.CONSISTENT_HASH, seed=9), range(400)) == before, "every router agrees"
    gone = fleet.workers.pop(3)
    after = places(fleet, range(400))
    assert {n for n in before if before[n] != after[n]} == {n for n in before if before[n] == gone.worker_id}


def test_consistent_hash_bounds_what_one_worker_gets() -> None:
    fleet = Fleet(4, policy=PolicyName.CONSISTENT_HASH)
    sent: Counter[str] = Counter()
    reasons = set()
    with ExitStack() as stack:
        for n in range(80):
            route = fleet.route([*PROMPT, n])
            stack.enter_context(route.in_flight())
            sent[route.worker.worker_id] += 1
            reasons.add(route.plan.reason)
    assert max(sent.values()) == 25, "a quarter more than an even share"
    assert "it ranks first for the prompt's beginning" in reasons
    assert any(" after 1 with " in reason for reason in reasons)


def test_a_session_hashes_by_its_key_and_not_by_its_prompt() -> None:
    fleet = Fleet(8, policy=PolicyName.CONSISTENT_HASH)
    assert len({fleet.route(prompt_of(300, seed=n), affinity_key="a").worker.worker_id for n in range(10)}) == 1
    assert len({fleet.route(PROMPT, affinity_key=str(n)).worker.worker_id for n in range(40)}) > 4


def test_a_session_stays_with_its_worker_until_that_has_too_much_or_is_gone() -> None:
    fleet = Fleet(3, policy=PolicyName.SESSION_AFFINITY)
    first = fleet.route(PROMPT, affinity_key="a")
    assert first.plan.reason.startswith("the session is new: the first token is expected in")
    with first.in_flight():
        pass
    holder = first.worker
    rest = [worker for worker in fleet.workers if worker is not holder]
    cache(rest[0], PROMPT)  # better, but not where the session is
    assert fleet.chosen(PROMPT, affinity_key="a") == {holder.worker_id}
    assert fleet.route(PROMPT, affinity_key="a").plan.reason == "it had the session's last request"
    assert fleet.chosen(PROMPT, affinity_key="b") == {rest[0].worker_id}
    assert fleet.chosen(PROMPT) == {rest[0].worker_id}
    report(holder, running=30)
    route = fleet.route(PROMPT, affinity_key="a")
    assert route.worker is rest[0]
    assert route.plan.reason.startswith(
        f"the session's worker {holder.worker_id} has 30 choices, 21 or more: the first"
    )
    report(holder)
    fleet.workers.remove(holder)
    route = fleet.route(PROMPT, affinity_key="a")
    assert route.plan.reason.startswith(f"the session's worker {holder.worker_id} is not there: the first")
    with route.in_flight():
        pass
    fleet.workers.append(holder)
    assert fleet.chosen(PROMPT, affinity_key="a") == {route.worker.worker_id}, "it has moved"


def test_sessions_are_forgotten_in_the_order_of_their_last_requests() -> None:
    policy = RoutingPolicy(PolicyName.SESSION_AFFINITY)
    for n in range(MOST_AFFINITY_KEYS):
        policy.has_sent(str(n), "w")
    policy.has_sent("0", "v")
    policy.has_sent("new", "w")
    assert (policy.holder("0"), policy.holder("1"), policy.holder("2")) == ("v", None, "w")


@pytest.mark.parametrize("policy", [PolicyName.LEAST_LOAD, PolicyName.ROUND_ROBIN, PolicyName.CONSISTENT_HASH])
def test_a_policy_that_compares_no_times_tells_none(policy: PolicyName) -> None:
    fleet = Fleet(2, policy=policy)
    assert [candidate.cost_s for candidate in fleet.route(PROMPT).plan.candidates] == [0.0, 0.0]
