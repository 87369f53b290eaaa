"""What a router knows of one worker: what it sent there, and how far the worker's reports can be relied on."""

import pytest

from tests.router.fleet_of_states import Fleet, cache, prompt_of, report
from tests.router.integrity import check_index
from trunkline_router.routing.credit import NO_CREDIT, Credit
from trunkline_router.routing.worker_state import KEPT_REQUESTS, STALE_AFTER_S, IndexAccuracy, WorkerState

PROMPT = prompt_of(1024)


def queued(worker: WorkerState) -> tuple[float, float, float]:
    facts = worker.facts()
    return facts.queued_interactive, facts.queued_standard, facts.queued_batch


@pytest.mark.parametrize("fails", [False, True])
def test_pitfall_16_every_exit_path_gives_the_load_back(fails: bool) -> None:
    fleet = Fleet(1)
    (worker,) = fleet.workers

    def use() -> None:
        with fleet.route(PROMPT, choices=3).in_flight() as flight:
            assert (worker.open_choices, worker.queued_tokens, queued(worker)) == (3, 1024, (0, 1024, 1024))
            assert worker.facts().choices == 3
            flight.has_started(0)
            flight.has_started(0)
            assert queued(worker) == (0, 0, 0)
            if fails:
                raise RuntimeError("the client went away")

    if fails:
        with pytest.raises(RuntimeError):
            use()
    else:
        use()
    assert (worker.open_choices, worker.queued_tokens, queued(worker)) == (0, 0, (0, 0, 0))
    assert (worker.credit(), worker.facts().choices) == (NO_CREDIT, 0)
    assert fleet.route(PROMPT).plan.matched_tokens == 0


def test_what_was_sent_is_neither_counted_twice_nor_forgotten_while_samples_come() -> None:
    fleet = Fleet(1)
    (worker,) = fleet.workers
    report(worker, uncached_tokens_by_lane=[0, 5000, 0])
    with fleet.route(PROMPT).in_flight():
        assert queued(worker)[1] == 6024, "the sample cannot know of it"
        report(worker, uncached_tokens_by_lane=[0, 4000, 0])
        assert queued(worker)[1] == 4000, "the sample may know of it, and says more"
        report(worker, uncached_tokens_by_lane=[0, 0, 0])
        assert queued(worker)[1] == 0, "by now it must, so the worker has computed it"
    with fleet.route(PROMPT).in_flight():
        report(worker, uncached_tokens_by_lane=[0, 0, 0])
        assert queued(worker)[1] == 1024, "the sample may not know of it"


def test_credits_are_given_back_from_the_age_in_which_they_were_taken() -> None:
    fleet = Fleet(1)
    (worker,) = fleet.workers
    with fleet.route(PROMPT, choices=2).in_flight():
        report(worker)
        with fleet.route(prompt_of(100, seed=3)).in_flight():
            assert worker.credit() == Credit(3, 1124)
        assert worker.credit() == Credit(2, 1024)
    assert (worker.credit(), worker.facts().choices) == (NO_CREDIT, 0)


def test_other_routers_credits_count_as_far_as_the_sample_says_less() -> None:
    fleet = Fleet(1)
    (worker,) = fleet.workers
    worker.take_foreign(Credit(5, 3000))
    assert (queued(worker), worker.facts().choices) == ((3000, 3000, 3000), 5)
    with fleet.route(PROMPT).in_flight():
        assert (queued(worker), worker.facts().choices) == ((3000, 4024, 4024), 6)
        report(worker, running=3, waiting=4, uncached_tokens_by_lane=[0, 9000, 0])
        assert (queued(worker), worker.facts().choices) == ((3000, 9000, 9000), 7)


def test_index_accuracy_is_what_was_found_of_what_was_promised_over_the_last_requests() -> None:
    accuracy = IndexAccuracy()
    assert (accuracy.share, accuracy.is_low) == (1.0, False)
    for _ in range(19):
        accuracy.add(100, 50)
    assert accuracy.share == 0.5
    assert not accuracy.is_low, "a few say little"
    accuracy.add(100, 1000)
    assert accuracy.share == pytest.approx((19 * 50 + 100) / 2000), "more than promised is no promise kept twice"
    assert accuracy.is_low
    for _ in range(KEPT_REQUESTS):
        accuracy.add(0, 0)
    assert (accuracy.share, accuracy.num_requests, accuracy.is_low) == (1.0, KEPT_REQUESTS, False), "what is old is out"


def answer(fleet: Fleet, prompt: list[int], cached_tokens: int) -> int:
    """A request of which this much is found in the worker's cache; returns what it was routed by."""
    route = fleet.route(prompt)
    with route.in_flight() as flight:
        flight.has_started(cached_tokens)
    return route.plan.matched_tokens


def test_a_worker_whose_index_is_wrong_is_routed_by_load_until_it_is_right_again() -> None:
    fleet = Fleet(1)
    (worker,) = fleet.workers
    wrong, right = [*PROMPT, 1], prompt_of(500, seed=1)
    cache(worker, wrong)
    cache(worker, right)
    for _ in range(20):
        assert answer(fleet, wrong, 0) == 1024
    assert worker.routed_by_load
    assert worker.accuracy.share == 0.0
    assert fleet.route(wrong).plan.candidates[0].routed_by_load
    assert answer(fleet, right, 496) == 0, "what the worker reports does not count"
    with fleet.route(right).in_flight():
        assert fleet.route(right).plan.matched_tokens == 496, "a running request's prompt does"
    worker.blocks.clear()
    cache(worker, right)
    assert answer(fleet, right, 496) == 0, "a new snapshot is as little relied on"
    requests = 0
    while worker.routed_by_load:
        answer(fleet, right, 496)
        requests += 1
        assert requests < 2 * KEPT_REQUESTS, "the index is compared on, so it can recover"
    assert worker.accuracy.share >= 0.9
    never_sent = prompt_of(300, seed=5)
    cache(worker, never_sent)
    assert fleet.route(never_sent).plan.matched_tokens == 288
    assert not fleet.index._expecting[worker.blocks.slot]
    check_index(fleet.index)


def test_a_worker_that_has_work_and_tells_nothing_is_routed_by_load_until_it_is_heard() -> None:
    fleet = Fleet(1)
    (worker,) = fleet.workers
    cache(worker, PROMPT)
    late_s = 1000.0  # it was idle until then: silence meant nothing
    with fleet.route(PROMPT, now_s=late_s).in_flight():
        assert not worker.is_stale(late_s + STALE_AFTER_S)
        with fleet.route(PROMPT, now_s=late_s + STALE_AFTER_S + 1).in_flight():
            assert worker.routed_by_load
            assert worker.distrust(late_s + STALE_AFTER_S + 1).endswith("its events have stopped")
            worker.heard(late_s + STALE_AFTER_S + 2)
            assert not worker.routed_by_load
            assert not worker.distrust(late_s + STALE_AFTER_S + 2)
    assert not worker.is_stale(2 * late_s), "it has nothing to tell"


def test_requests_that_may_not_use_the_cache_promise_nothing() -> None:
    fleet = Fleet(1)
    (worker,) = fleet.workers
    cache(worker, PROMPT)
    route = fleet.route(PROMPT, may_use_cache=False)
    assert route.plan.matched_tokens == 0
    with route.in_flight() as flight:
        flight.has_started(0)
    assert worker.accuracy.num_requests == 0


def test_granted_choices_that_may_never_come_make_no_idle_worker_stale_and_others_do() -> None:
    fleet = Fleet(1)
    (worker,) = fleet.workers
    worker.heard(0.0)
    later_s = 10 * STALE_AFTER_S
    with fleet.route(PROMPT).in_flight(is_granted=True):
        assert (worker.open_choices, worker.granted_choices) == (1, 1)
        assert not worker.is_stale(later_s)
        with fleet.route(PROMPT, now_s=later_s).in_flight():
            assert not worker.is_stale(later_s + STALE_AFTER_S), "it has been expected to say something since now"
            assert worker.is_stale(later_s + STALE_AFTER_S + 1)
        assert not worker.is_stale(later_s + STALE_AFTER_S + 1)
    assert (worker.open_choices, worker.granted_choices) == (0, 0)
