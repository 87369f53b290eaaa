"""The pure parts of failover: when to try again, how fast, and whom to leave alone."""

from array import array
from contextlib import nullcontext

import pytest

from trunkline.protocol import CLEARING_STEPS
from trunkline.status import (
    CODE_INVALID_ARGUMENT,
    CODE_RESOURCE_EXHAUSTED,
    INTERNAL,
    INVALID_REQUEST,
    NO_WORKER,
    OVERLOADED,
    QUARANTINED,
    RequestRefused,
    no_worker,
)
from trunkline.v1.worker_pb2 import GetModelResponse, StepCostModel
from trunkline_router.quotas.convictions import CONVICTION_MS, Convictions
from trunkline_router.quotas.store import MAX_CONVICTIONS
from trunkline_router.request import failover
from trunkline_router.request.failover import (
    BRIEF_S,
    CLEARING_STEPS_AGAIN,
    LEAST_PER_S,
    MAX_FULL,
    MAX_WITHOUT_PROGRESS,
    MOST_AT_ONCE,
    MOST_CONVICTIONS,
    MOST_WAIT_S,
    RETRY_SHARE,
    WITNESS_S,
    Cells,
    Computation,
    FailoverLimits,
    Quarantine,
    Recovery,
    RetryBudget,
    Suspicion,
)
from trunkline_router.workers.breaker import (
    FAILURES_TO_OPEN,
    OPEN_FIRST_S,
    OPEN_MOST_S,
    SHORT_LIFE_S,
    STABLE_S,
    WorkerBreaker,
)
from trunkline_router.workers.health import LEAST_SHARE, LONG_STEPS, Liveness, longest_silence_s, slow_start_share

LOST = no_worker("lost")


def full(delay_ms: int = 500) -> RequestRefused:
    return RequestRefused(CODE_RESOURCE_EXHAUSTED, OVERLOADED, "full", retry_delay_ms=delay_ms)


def note(recovery: Recovery, refused: RequestRefused, num_tokens: int = 0, *, can_resume: bool = True) -> None:
    recovery.on_refusal(refused, progress=num_tokens, has_output=num_tokens > 0, can_resume=can_resume)


def test_what_another_worker_would_say_too_is_told_at_once() -> None:
    bad = RequestRefused(CODE_INVALID_ARGUMENT, INVALID_REQUEST, "no")
    with pytest.raises(RequestRefused) as caught:
        note(Recovery(FailoverLimits()), bad)
    assert caught.value is bad


def test_a_request_whose_ledger_was_given_up_ends_with_its_worker() -> None:
    with pytest.raises(RequestRefused):
        note(Recovery(FailoverLimits()), LOST, 10, can_resume=False)


def test_resumptions_are_bounded_whatever_the_progress() -> None:
    recovery = Recovery(FailoverLimits(max_resumptions=5))
    for tokens in range(1, 6):
        note(recovery, LOST, tokens)
    with pytest.raises(RequestRefused):
        note(recovery, LOST, 6)


def test_losses_without_progress_are_bounded_and_progress_forgives_them() -> None:
    recovery = Recovery(FailoverLimits(max_resumptions=64))
    for tokens in (1, 2):
        for _ in range(MAX_WITHOUT_PROGRESS - 1):
            note(recovery, LOST, tokens)
    note(recovery, LOST, 3)
    for _ in range(MAX_WITHOUT_PROGRESS - 2):
        note(recovery, LOST, 3)
    with pytest.raises(RequestRefused):
        note(recovery, LOST, 3)


def test_full_workers_end_a_new_request_but_not_one_that_has_begun() -> None:
    new, begun = Recovery(FailoverLimits()), Recovery(FailoverLimits())
    note(begun, LOST, 7)
    for _ in range(3 * MAX_FULL):
        note(begun, full(), 7)
    assert not begun.lost_last
    for _ in range(MAX_FULL - 1):
        note(new, full())
    with pytest.raises(RequestRefused) as caught:
        note(new, full(200))
    assert caught.value.retry_delay_ms == 200


def test_handovers_with_progress_are_nobodys_failure() -> None:
    recovery = Recovery(FailoverLimits(max_resumptions=2))
    for tokens in range(1, 50):
        recovery.on_refusal(LOST, progress=tokens, has_output=True, can_resume=True, handed_over=True)


def test_a_request_that_lost_nothing_does_not_wait_and_one_that_did_waits_its_patience_once() -> None:
    with pytest.raises(RequestRefused):
        Recovery(FailoverLimits()).wait_s(0.0, LOST, has_output=False)
    recovery = Recovery(FailoverLimits(patience_s=30.0))
    note(recovery, LOST, 1)
    assert recovery.wait_s(100.0, LOST, has_output=True) == 30.0
    assert recovery.wait_s(110.0, LOST, has_output=True) == 20.0
    with pytest.raises(RequestRefused):
        recovery.wait_s(130.0, LOST, has_output=True)
    recovery.stop_waiting()
    assert recovery.wait_s(130.0, LOST, has_output=True) == 30.0, "in a queue for a worker it is not used up"
    note(recovery, LOST, 2)
    assert recovery.wait_s(150.0, LOST, has_output=True) == 30.0, "progress earns new patience"


def fail(breaker: WorkerBreaker, now_s: float) -> None:
    breaker.dispatch().refused(NO_WORKER, now_s)


def test_a_breaker_opens_after_failures_in_a_row_and_a_trial_closes_it() -> None:
    breaker = WorkerBreaker()
    for _ in range(FAILURES_TO_OPEN - 1):
        fail(breaker, 0.0)
    breaker.dispatch().succeeded(0.0)
    for _ in range(FAILURES_TO_OPEN):
        assert breaker.allows(0.0)
        fail(breaker, 0.0)
    assert not breaker.allows(OPEN_FIRST_S - 0.01)
    assert breaker.allows(OPEN_FIRST_S)
    trial = breaker.dispatch()
    assert not breaker.allows(OPEN_FIRST_S), "one trial at a time"
    trial.succeeded(OPEN_FIRST_S)
    assert breaker.is_closed


def test_a_trial_that_fails_doubles_the_time_up_to_a_bound_and_one_without_outcome_makes_room_for_another() -> None:
    breaker, now_s = WorkerBreaker(), 0.0
    for _ in range(FAILURES_TO_OPEN):
        fail(breaker, now_s)
    for doubled in range(1, 10):
        now_s += OPEN_MOST_S
        breaker.dispatch().end()
        assert breaker.allows(now_s)
        fail(breaker, now_s)
        open_s = min(OPEN_FIRST_S * 2**doubled, OPEN_MOST_S)
        assert not breaker.allows(now_s + open_s - 0.01)
        assert breaker.allows(now_s + open_s)


def test_old_requests_say_nothing_of_a_worker_that_fails_new_ones() -> None:
    breaker = WorkerBreaker()
    old = breaker.dispatch()
    old.succeeded(0.0)
    for _ in range(FAILURES_TO_OPEN):
        old.succeeded(1.0)  # its second response, and its third
        fail(breaker, 1.0)
    assert not breaker.is_closed
    trial = breaker.dispatch()
    old.end()
    assert not breaker.allows(1.0 + OPEN_FIRST_S), "nor is its end that of the trial"
    trial.end()


def test_a_worker_that_keeps_dying_young_is_left_alone_for_longer_and_an_old_one_is_not() -> None:
    breaker = WorkerBreaker()
    breaker.on_lost(0.0, lived_s=SHORT_LIFE_S)
    assert breaker.is_closed
    breaker.on_lost(1.0, lived_s=2.0)
    assert not breaker.allows(1.0)
    breaker.dispatch().succeeded(2.0)
    breaker.on_lost(3.0, lived_s=2.0)
    assert not breaker.allows(3.0 + OPEN_FIRST_S), "the second time it is twice as long"
    breaker.dispatch().succeeded(10.0)
    breaker.on_lost(10.0 + STABLE_S + 1, lived_s=1.0)
    assert breaker.allows(10.0 + STABLE_S + 1 + OPEN_FIRST_S), "long ago"


@pytest.mark.parametrize(("reason", "fails"), [(NO_WORKER, True), (INTERNAL, True), (INVALID_REQUEST, False)])
def test_a_refusal_for_a_good_reason_is_no_failure_of_the_worker(reason: str, fails: bool) -> None:
    breaker = WorkerBreaker()
    for _ in range(FAILURES_TO_OPEN):
        breaker.dispatch().refused(reason, 0.0)
    assert breaker.is_closed is not fails


def test_the_budget_lets_one_workers_requests_go_on_at_once_then_a_share_and_refuses_what_would_wait_too_long() -> None:
    budget = RetryBudget(0.0)
    assert [budget.take(0.0) for _ in range(int(MOST_AT_ONCE))] == [0.0] * int(MOST_AT_ONCE)
    most = int(MOST_WAIT_S * LEAST_PER_S)
    waits = [budget.take(0.0) for _ in range(most)]
    assert waits == [pytest.approx((n + 1) / LEAST_PER_S) for n in range(most)]
    assert [budget.take(0.0) for _ in range(1000)] == [None] * 1000
    assert budget.take(1 / LEAST_PER_S) == pytest.approx(MOST_WAIT_S), "those that were refused have left no debt"
    for _ in range(int((most + 2) / RETRY_SHARE)):
        budget.on_request()
    assert budget.take(1 / LEAST_PER_S) == 0.0, "requests that go well pay for retries"


def test_silence_counts_only_with_work_and_while_this_side_was_awake() -> None:
    liveness = Liveness(4.0)
    assert liveness.check_interval_s == 1.0
    assert not any(liveness.is_silent(now, num_messages=1, has_work=False) for now in range(20))
    silent = [liveness.is_silent(now, num_messages=1, has_work=True) for now in (20, 21, 22, 23, 24)]
    assert silent == [False, False, False, False, True]
    assert not liveness.is_silent(25, num_messages=2, has_work=True), "a message ends it"
    assert not liveness.is_silent(1024, num_messages=2, has_work=True), "a router that slept learns nothing from it"


def test_a_worker_of_long_steps_may_be_silent_for_longer() -> None:
    liveness = Liveness(4.0)
    silent = [liveness.is_silent(now, num_messages=1, has_work=True, allowance_s=2.0) for now in range(8)]
    assert silent == [False] * 6 + [True] * 2
    model = GetModelResponse(max_step_tokens=2000, batch_window_ms=500)
    cost = StepCostModel(fixed_s=0.1, token_s=0.001)
    assert longest_silence_s(model, cost) == pytest.approx(LONG_STEPS * 2.1 + 0.5)
    assert longest_silence_s(GetModelResponse(), StepCostModel()) == 0, "a worker that does not say"


def test_a_cell_holds_one_suspect_until_it_has_survived_a_few_steps() -> None:
    freed: list[bool] = []
    cells = Cells(lambda: freed.append(True))
    suspicion = Suspicion(cells)
    assert not suspicion.on_death(sole_suspect=True), "nobody is convicted of the first one"
    suspicion.enter("w")
    suspicion.on_progress(CLEARING_STEPS - 1)
    assert "w" in cells.taken
    suspicion.on_progress(CLEARING_STEPS)
    assert "w" not in cells.taken
    assert freed == [True]
    assert not suspicion.is_suspect
    suspicion.leave()
    assert freed == [True], "once"


def test_a_death_convicts_in_a_cell_and_alone_only_and_a_second_suspicion_takes_longer_to_clear() -> None:
    cells = Cells(lambda: None)
    suspicion = Suspicion(cells)
    suspicion.on_death(sole_suspect=False)
    suspicion.enter("w")
    suspicion.on_progress(CLEARING_STEPS)
    suspicion.broke_off()
    assert not suspicion.on_death(sole_suspect=True), "it had left its cell: others may have been there"
    suspicion.enter("v")
    suspicion.on_progress(CLEARING_STEPS)
    assert suspicion.is_suspect
    assert "v" in cells.taken
    suspicion.broke_off()
    assert "v" not in cells.taken, "whenever its client reads on"
    assert not suspicion.on_death(sole_suspect=False)
    suspicion.enter("u")
    suspicion.broke_off()
    assert suspicion.on_death(sole_suspect=True)
    suspicion.enter("t")
    suspicion.on_progress(CLEARING_STEPS_AGAIN)
    assert "t" not in cells.taken


def test_convictions_end_and_are_bounded() -> None:
    convictions = Convictions()
    assert not convictions.hold_any(0.0)
    convictions.add(b"x", 0.0)
    for now_ms, does in ((CONVICTION_MS - 1, True), (CONVICTION_MS, False)):
        assert convictions.holds(b"x", now_ms) is convictions.hold_any(now_ms) is does
    for number in range(MAX_CONVICTIONS + 1):
        convictions.add(number.to_bytes(4, "big"), number / MAX_CONVICTIONS)
    assert not convictions.holds((0).to_bytes(4, "big"), 1.0)
    assert convictions.holds(MAX_CONVICTIONS.to_bytes(4, "big"), 1.0)


def test_a_convicted_prompt_is_refused_to_its_tenant_and_model_alone() -> None:
    quarantine, prompt = Quarantine(), array("i", [1, 2, 3])
    assert quarantine.convict(Computation("t", "m", prompt), {"w"}, now_s=0.0)
    with pytest.raises(RequestRefused) as caught:
        quarantine.check(Computation("t", "m", array("i", [1, 2, 3])), now_s=1.0)
    assert caught.value.reason == QUARANTINED
    for other in (("other", "m", prompt), ("t", "other", prompt), ("t", "m", prompt[:2]), ("tm", "", prompt)):
        quarantine.check(Computation(*other), now_s=1.0)


def test_a_prompt_is_convicted_with_its_work_alone() -> None:
    prompt, works = array("i", [1, 2, 3]), [b"", b"adapter a", b"adapter b"]
    for convicted in works:
        quarantine = Quarantine()
        quarantine.convict(Computation("t", "m", prompt, convicted), {"w"}, now_s=0.0)
        for work in works:
            with pytest.raises(RequestRefused) if work == convicted else nullcontext():
                quarantine.check(Computation("t", "m", prompt, work), now_s=1.0)


GRAMMAR, OTHER = b"g" * 32, b"o" * 32


def asked(number: int, grammar: bytes = GRAMMAR) -> Computation:
    return Computation("t", "m", array("i", [number]), b"", grammar)


def is_refused(quarantine: Quarantine, request: Computation, now_s: float) -> bool:
    try:
        quarantine.check(request, now_s)
    except RequestRefused:
        return True
    return False


def test_a_grammar_is_convicted_with_its_second_prompt_and_each_conviction_counts_once() -> None:
    quarantine, later_s = Quarantine(), WITNESS_S + 4.0
    for _ in range(2):  # copies that were under way
        quarantine.convict(asked(1), {"w"}, 0.0)
    assert quarantine.num_in_force(0.0) == 1
    assert [is_refused(quarantine, asked(number), 1.0) for number in (1, 2)] == [True, False]
    assert not is_refused(quarantine, asked(1, OTHER), 1.0)
    assert not is_refused(quarantine, asked(1, b""), 1.0)
    quarantine.convict(asked(1, OTHER), {"w"}, 1.0)
    assert not is_refused(quarantine, asked(2, OTHER), 1.0), "another grammar's prompt does not count"
    quarantine.convict(asked(2), {"w"}, 2.0)
    assert quarantine.num_in_force(2.0) == 3
    assert [is_refused(quarantine, asked(number), 3.0) for number in (1, 2, 3)] == [True] * 3
    assert not is_refused(quarantine, asked(3, OTHER), 3.0)
    assert is_refused(quarantine, asked(3), WITNESS_S + 1.0)
    quarantine.convict(asked(3), {"w"}, WITNESS_S + 3.0)
    assert [is_refused(quarantine, asked(number), later_s) for number in (2, 3)] == [False, True], "an hour has passed"


def test_what_is_not_believed_convicts_no_grammar_in_the_fleet() -> None:
    quarantine, shared = Quarantine(), Convictions()
    quarantine._convictions = shared
    for number in range(MOST_CONVICTIONS):
        assert quarantine.convict(asked(number, bytes([number])), {"liar"}, 0.0)
    assert not quarantine.convict(asked(1), {"liar"}, 1.0)
    assert quarantine.convict(asked(2), {"w"}, 2.0)
    assert not is_refused(quarantine, asked(3), 3.0)
    assert not quarantine.convict(asked(3), {"liar"}, 3.0)
    assert is_refused(quarantine, asked(4), 4.0), "here, for a minute"
    assert not is_refused(quarantine, asked(4), 4.0 + BRIEF_S)
    assert shared.num_in_force(4e3) == MOST_CONVICTIONS + 1
    assert quarantine.convict(asked(4), {"w"}, 5.0 + BRIEF_S)
    assert is_refused(quarantine, asked(5), 6.0 + 2 * BRIEF_S)


def test_what_is_remembered_of_grammars_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failover, "MOST_GRAMMARS", 2)
    quarantine = Quarantine()
    for grammar in (b"a", b"b", b"c"):
        quarantine.convict(asked(1, grammar), {"w"}, 0.0)
    for grammar in (b"c", b"a"):
        quarantine.convict(asked(2, grammar), {"w"}, 1.0)
    assert [is_refused(quarantine, asked(3, grammar), 2.0) for grammar in (b"a", b"b", b"c")] == [False, False, True]


def test_a_fresh_worker_takes_a_growing_share() -> None:
    shares = [slow_start_share(passed_s, 10.0) for passed_s in (0.0, 2.0, 5.0, 10.0, 99.0)]
    assert shares[0] == LEAST_SHARE
    assert shares == sorted(shares)
    assert shares[-2:] == [1.0, 1.0]
    assert slow_start_share(0.0, 0.0) == 1.0, "0 turns it off"
