"""Rare cases of the scheduler: sequences admitted, aged, preempted or waited for within one step, in any order."""

from math import inf
from typing import Any

import numpy as np
import pytest

from tests.worker.rig import Rig
from trunkline_worker.cache.sequence import Sequence
from trunkline_worker.scheduler.limits import AdmissionRule, Batching
from trunkline_worker.scheduler.sequence_table import StepOutput
from trunkline_worker.scheduler.step_cost import STEPS_PER_FIT, Experience, Size, StepLoad
from trunkline_worker.step.lanes import Lane
from trunkline_worker.step.plan import StepPlan, StepResult

INTERACTIVE, STANDARD, BATCH = Lane


def with_cost(rig: Rig, *, fixed_s: float, token_s: float) -> Rig:
    """A rig whose scheduler knows what steps cost."""
    cost = rig.scheduler.cost
    cost.fixed_s, cost.token_s, cost._seen = fixed_s, token_s, STEPS_PER_FIT
    cost.experience = Experience(trusted=Size(inf, inf, inf))
    cost.observe = lambda load, time_s, *, is_rehearsed=False: None  # type: ignore[method-assign]
    return rig


@pytest.mark.parametrize("rule", AdmissionRule)
@pytest.mark.parametrize("num_blocks", range(10, 30, 3))
def test_an_aged_sequence_that_reaches_its_promise_is_not_evicted_in_the_step_that_computes_it(
    num_blocks: int, rule: AdmissionRule
) -> None:
    for prompt in range(5, 9):
        rig = Rig(num_blocks=num_blocks, block_size=4, max_running=2, aging_s=10.0, admission=rule, aged_tokens=8)
        rig.submit([1] * prompt, 120, lane=INTERACTIVE)
        rig.submit([2] * 8, 20, lane=INTERACTIVE)
        rig.submit([3] * 8, 150, lane=BATCH)
        rig.run()
        assert len(rig.finished) == 3


@pytest.mark.parametrize("num_blocks", range(28, 33))
@pytest.mark.parametrize("bulk_blocks", range(4, 9))
def test_a_sequence_that_was_just_admitted_is_not_evicted_in_the_same_step(num_blocks: int, bulk_blocks: int) -> None:
    for wait in range(1, 5):
        rig = Rig(num_blocks=num_blocks, block_size=16, max_running=64, max_step_tokens=2048)
        rig.submit([n % 50 for n in range(bulk_blocks * 16 - 8)], 6, lane=BATCH)
        rig.step()
        for n in range(10):
            rig.submit([n + 1] * 30, 4, lane=INTERACTIVE)
        for _ in range(wait):
            rig.step()
        rig.submit([40] * 30, 4, lane=INTERACTIVE)
        rig.run()
        assert len(rig.finished) == 12


@pytest.mark.parametrize("lane", [INTERACTIVE, BATCH])
def test_a_target_that_one_alone_misses_does_not_shut_the_others_out(lane: Lane) -> None:
    rig = with_cost(Rig(max_running=64, num_blocks=1024, itl_target_s=0.1), fixed_s=0.12, token_s=1e-4)
    for n in range(32):
        rig.submit([n], 40, lane=lane)
    for _ in range(8):
        rig.step()
    assert len(rig.scheduler.running) == 32


def test_the_lower_lanes_leave_half_of_the_time_to_prompts() -> None:
    rig = with_cost(Rig(max_running=64, num_blocks=1024, itl_target_s=0.1), fixed_s=0.02, token_s=4e-3)
    for n in range(60):
        rig.submit([n], 40, lane=BATCH)
    for _ in range(20):
        rig.step()
    assert 8 <= len(rig.scheduler.running) <= 12, "about (0.1 - 0.02) / 2 / 0.004"


def loaded(lane: Lane, *, count: int = 40, **limits: Any) -> Rig:
    """A rig in which the steps of those who run take as long as they may; each step takes a second."""
    rig = with_cost(
        Rig(max_running=64, num_blocks=4096, max_step_tokens=256, itl_target_s=1.0, **limits),
        fixed_s=0.1,
        token_s=0.05,
    )
    for n in range(count):
        rig.submit([n], 200, lane=lane)
    for _ in range(3):
        rig.step()
    assert len(rig.scheduler.running) < 20
    assert rig.scheduler.is_blocked
    return rig


@pytest.mark.parametrize("lane", [INTERACTIVE, STANDARD])
def test_after_five_target_times_waiting_sequences_may_slow_the_others_down_to_half_their_pace(lane: Lane) -> None:
    rig = loaded(lane)
    running = len(rig.scheduler.running)
    assert rig.scheduler.wakes_s() == 5.0
    while rig.now_s < 5.0:
        assert len(rig.scheduler.running) == running
        rig.step()
    for _ in range(40 - running):  # where steps take too long already, one prompt in each
        rig.step()
    assert len(rig.scheduler.running) == 38, "(2.0 - 0.1) / 0.05: a step of two target times"


def test_a_plan_repeats_until_a_lane_is_overdue() -> None:
    rig = loaded(STANDARD)
    assert rig.scheduler.wakes_s() == 5.0  # the engine repeats no plan past it
    rig.submit([99], 200)
    rig.step()
    assert rig.scheduler.wakes_s() == 5.0, "the oldest sequence is the first to be overdue"


@pytest.mark.parametrize("lane", [INTERACTIVE, STANDARD])
@pytest.mark.parametrize("output", [(), (1,)], ids=["new", "resumed"])
def test_a_tenant_that_sends_its_requests_again_holds_no_other_up(lane: Lane, output: tuple[int, ...]) -> None:
    rig = loaded(lane, count=25)
    mine: list[int] = []
    for _ in range(6):
        rig.step()
    victim, started_s = rig.submit([77], 4, lane=lane, tenant="victim", output=output), rig.now_s
    while len(rig.outputs[victim]) == len(output):
        mine.append(rig.submit([500], 4, lane=lane, tenant="renews"))
        if len(mine) > 2:
            rig.abort(mine.pop(0))
        rig.step()
        assert rig.now_s < started_s + 20


class Paced(Rig):
    """A rig whose steps take as long as the cost model says."""

    def commit(self, plan: StepPlan, result: StepResult) -> list[StepOutput]:
        self.now_s += self.scheduler.cost.time_s(self.scheduler.loads[plan.step_id]) - 1.0
        return super().commit(plan, result)


@pytest.mark.parametrize("run_ahead", [pytest.param(0, marks=pytest.mark.slow), 1])
@pytest.mark.parametrize(("standard", "token_s"), [(60, 0.0025), pytest.param(150, 0.0008, marks=pytest.mark.slow)])
def test_interactive_requests_before_a_slow_standard_lane_preempt_none(
    standard: int, token_s: float, run_ahead: int
) -> None:
    limits = {"max_running": 256, "num_blocks": 1 << 16, "max_step_tokens": 4096, "itl_target_s": 0.1}
    rig = with_cost(Paced(run_ahead=run_ahead, interactive_reserve=0.05, **limits), fixed_s=0.01, token_s=token_s)  # type: ignore[arg-type]
    for n in range(standard):
        rig.submit([n] * 12, 3000)
    while token_s * len(rig.scheduler.running) <= 0.11:
        rig.step()
        assert rig.now_s < 10.0, "their steps come to take longer than the target"
    for n in range(4):
        quick, sent_s = rig.submit([999, n] * 3, 2, lane=INTERACTIVE), rig.now_s
        while not rig.outputs[quick]:
            rig.step()
        assert rig.now_s - sent_s < 0.5
        until_s = rig.now_s + 1.0
        while rig.now_s < until_s:
            rig.step()
    assert rig.stats.preemptions == 0


def test_bulk_work_never_stretches_steps() -> None:
    rig = loaded(BATCH, aging_s=1e6)
    running = len(rig.scheduler.running)
    for _ in range(30):
        rig.step()
    assert len(rig.scheduler.running) == running
    assert rig.scheduler.wakes_s() == 1e6


def test_the_pace_of_a_higher_lane_is_worth_any_wait() -> None:
    rig = loaded(STANDARD, aging_s=1e6)
    first = rig.submit([98], 40, lane=INTERACTIVE)
    rig.step()
    running = len(rig.scheduler.running)
    for _ in range(30):
        rig.step()
        assert len(rig.scheduler.running) == running
    while first not in rig.finished:
        rig.step()
    for _ in range(40):
        rig.step()
    assert len(rig.scheduler.running) == 38


@pytest.mark.parametrize("lane", [INTERACTIVE, STANDARD])
def test_a_sequence_that_streams_already_continues_at_once(lane: Lane) -> None:
    rig = loaded(lane)
    running = len(rig.scheduler.running)
    resumed = rig.submit([99], 200, output=[5, 6, 7], lane=lane)
    rig.step()
    assert len(rig.scheduler.running) == running + 1
    assert rig.sequences[resumed] in rig.scheduler.running
    assert rig.scheduler.drain_rate.wait_s(rig.sequences[resumed], rig.scheduler.waiting, rig.now_s) == 0
    rig.submit([98], 40, lane=INTERACTIVE)
    rig.step()
    beside = rig.submit([97], 200, output=[5, 6, 7], lane=lane)
    rig.step()
    assert rig.sequences[beside] in rig.scheduler.running, "a higher lane's pace does not keep it out"


def test_prompts_get_a_share_of_steps_whose_decodes_alone_take_too_long() -> None:
    rig = Rig(max_running=64, num_blocks=4096, max_step_tokens=256, itl_target_s=0.1)
    for n in range(40):
        rig.submit([n] * 20, 100)
    while any(sequence.num_output == 0 for sequence in rig.sequences.values()):
        rig.step()
    with_cost(rig, fixed_s=0.01, token_s=5e-4).scheduler.cost.kv_token_s = 2e-4
    rig.submit([41] * 200, 4, output=[1])
    rig.step()
    decodes_s = rig.scheduler.cost.time_s(StepLoad(40, sum(len(s.token_ids) for s in rig.scheduler.running[:40]), 0.0))
    assert decodes_s > 0.1
    chunk = rig.plans[-1].num_tokens - rig.plans[-1].num_decodes
    assert 0.2 * decodes_s < 5e-4 * chunk <= 0.25 * decodes_s


def test_no_sequence_waits_for_a_prefix_that_a_lower_lane_computes() -> None:
    def steps_to_first_token(prompt: list[int]) -> int:
        rig = with_cost(
            Rig(num_blocks=1000, block_size=16, max_running=64, max_step_tokens=2048, itl_target_s=0.1),
            fixed_s=0.005,
            token_s=1e-4,
        )
        rig.submit(shared, 4, lane=BATCH)
        rig.step()
        sequence = rig.sequences[rig.submit([*prompt, 1, 2, 3], 4, lane=INTERACTIVE)]
        steps = 0
        while sequence.first_token_s is None:
            # Interactive requests that go before a batch prompt keep arriving.
            rig.submit([(steps * 7 + at * at) % 50 for at in range(100)], 1, lane=INTERACTIVE)
            rig.step()
            steps += 1
        return steps

    shared = [n % 37 for n in range(4000)]
    assert steps_to_first_token(shared) <= steps_to_first_token(shared[::-1])


def test_a_sequence_that_waits_for_a_prefix_does_not_keep_room_from_those_behind() -> None:
    rig = Rig(num_blocks=40, block_size=4, max_running=4, max_step_tokens=8)
    for n in range(2):
        rig.submit([n] * 4, 60, lane=BATCH)
    rig.step()
    long = list(range(40))
    rig.submit(long, 60, lane=INTERACTIVE)
    rig.step()
    waits = rig.submit([*long, 7, 8], 4, lane=INTERACTIVE)
    small = rig.submit([2] * 6, 4, lane=INTERACTIVE)
    for _ in range(12):
        rig.step()
    assert rig.sequences[small].first_token_s is not None
    rig.run()
    assert {waits, small} <= set(rig.finished)


def test_no_sequence_is_evicted_for_one_that_would_not_fit_even_then() -> None:
    rig = Rig(num_blocks=100, block_size=4, max_running=16, max_step_tokens=256)
    for _ in range(200):
        rig.scheduler.admission.output_lengths[INTERACTIVE].observe(200)
    rig.submit([1] * 8, 260, lane=INTERACTIVE)
    rig.step()
    for n in range(6):
        rig.submit([10 + n] * 16, 100, lane=BATCH)
    for _ in range(10):
        rig.step()
    running = len(rig.scheduler.running)
    assert running > 1
    rig.submit([2] * 8, 260, lane=INTERACTIVE)  # its lane would outgrow the pool
    for _ in range(20):
        rig.step()
        assert len(rig.scheduler.running) >= running, "others use what it cannot use"
    assert rig.stats.preemptions == 0
    rig.run()
    assert len(rig.finished) == 8


def test_sequences_that_waited_and_left_leave_nothing_behind() -> None:
    rig = Rig(num_blocks=8, max_running=1)
    rig.submit([1] * 4, 20, lane=INTERACTIVE)
    rig.step()
    rig.submit([2] * 4, 20, lane=BATCH, tenant="head")
    for n in range(3000):
        assert rig.abort(rig.submit([3], 4, lane=BATCH, tenant=f"tenant {n % 700}", within_s=1e6))
    rig.scheduler.check_integrity()  # what is kept is bounded by the sequences that wait
    rig.run()
    for lane in Lane:
        for _ in range(200):
            rig.submit([4], 1, lane=lane)
            rig.run()
    rig.scheduler.check_integrity()


def test_many_sequences_that_wait_for_one_prefix_are_looked_at_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(num_blocks=600, block_size=16, max_running=64, max_step_tokens=64)
    base = [n % 37 for n in range(4000)]
    rig.submit(base, 4)
    rig.step()
    for n in range(200):
        rig.submit([*base, n % 50], 4, tenant=str(n))
    looks = 0
    match = rig.blocks.match

    def counted(sequence: Sequence) -> int:
        nonlocal looks
        looks += 1
        return match(sequence)

    monkeypatch.setattr(rig.blocks, "match", counted)
    for _ in range(5):
        rig.step()
    assert looks <= 5 * 2 * 64


def test_a_deadline_is_judged_by_what_is_not_cached() -> None:
    rig = with_cost(Rig(num_blocks=600, block_size=16, max_step_tokens=8192), fixed_s=0.01, token_s=1e-3)
    prompt = [n % 37 for n in range(8000)]
    rig.submit(prompt, 1)
    rig.run()
    cached, fresh = (rig.submit(p, 1, within_s=2.0) for p in (prompt, prompt[::-1]))
    deadlines = rig.scheduler.deadlines
    assert not deadlines.out_of_reach(rig.sequences[cached], 0.0, rig.now_s)
    assert deadlines.out_of_reach(rig.sequences[fresh], 0.0, rig.now_s)
    assert [s.sequence_id for s in rig.scheduler.refuse_hopeless(rig.now_s)] == [fresh]
    rig.run()
    assert cached in rig.finished


def test_a_long_prompt_is_hopeless_before_a_short_one_with_an_earlier_deadline() -> None:
    rig = with_cost(Rig(num_blocks=600, block_size=16, max_running=1), fixed_s=0.01, token_s=1e-3)
    rig.submit([1], 100)
    rig.step()
    soon = rig.submit([2], 1, within_s=5.0)
    later = rig.submit([n % 50 for n in range(8000)], 1, within_s=9.0)
    assert rig.scheduler.refuse_hopeless(rig.now_s) == []
    assert rig.scheduler.deadlines.next_s() == pytest.approx(rig.now_s + 9.0 - 8.01)
    rig.now_s += 2.0
    assert [s.sequence_id for s in rig.scheduler.refuse_hopeless(rig.now_s)] == [later]
    rig.now_s += 3.0
    assert [s.sequence_id for s in rig.scheduler.refuse_hopeless(rig.now_s)] == [soon]
    counts = rig.stats.lanes[STANDARD]
    assert (counts.accepted, counts.expired, counts.refused) == (3, 2, 0)


def test_an_idle_worker_takes_several_with_deadlines_at_once() -> None:
    rig = Rig(max_running=8)
    for _ in range(3):  # now and then one, and nothing for minutes
        rig.submit([1], 2)
        rig.run()
        rig.now_s += 300.0
    for _ in range(4):
        sequence = rig.sequences[rig.submit([2], 2, within_s=30.0)]
        assert rig.scheduler.drain_rate.wait_s(sequence, rig.scheduler.waiting, rig.now_s) == 0.0
    rig.run()


@pytest.mark.parametrize("kind", [Batching.STATIC_UNPADDED, Batching.DYNAMIC, Batching.STATIC])
def test_no_sequence_joins_a_batch_after_it_began(kind: Batching) -> None:
    rig = Rig(max_running=8, max_step_tokens=4, batching=kind, batch_size=3, batch_window_s=0.0)
    members = [rig.submit([n] * 4, 6) for n in range(3)]
    rig.step()  # room in the step for the first prompt only
    rig.abort(members[2])
    late = rig.submit([9] * 4, 2)
    rig.step()
    while not {members[0], members[1]} <= set(rig.finished):
        assert late not in {s.sequence_id for s in rig.scheduler.running}
        rig.step()
    rig.run()
    assert late in rig.finished


def test_a_window_that_is_over_opens_the_batch_whatever_the_rounding() -> None:
    for n in range(200):
        rig = Rig(batching=Batching.DYNAMIC, batch_size=2, batch_window_s=0.1)
        rig.now_s = 108.0 + n * 0.3617
        rig.submit([1], 1)
        assert rig.schedule() is None
        opens_s = rig.scheduler.wakes_s()
        assert opens_s is not None
        rig.now_s = opens_s
        assert rig.schedule() is not None


def test_the_first_token_has_none_before_it() -> None:
    rig = Rig()
    rig.now_s = 5000.0  # a machine that has been up for long
    rig.submit([1, 2], 8)
    rig.run()
    itl = rig.stats.lanes[STANDARD].itl
    assert itl.count == 7
    assert itl.sum == pytest.approx(7.0)


def test_a_stop_string_is_an_end_like_others() -> None:
    rig = Rig()
    stopped = rig.submit([1, 2], 30)
    for _ in range(5):
        rig.step()
    assert rig.scheduler.finish(stopped, rig.now_s)
    assert not rig.scheduler.finish(stopped, rig.now_s), "it is gone"
    counts = rig.stats.lanes[STANDARD]
    assert (counts.finished, counts.aborted, counts.e2e.count, counts.tpot.count) == (1, 0, 1, 1)
    rig.run()
    assert rig.blocks.num_live == 0


def test_a_sequence_whose_output_is_no_token_needs_its_prompt_alone_and_teaches_no_length() -> None:
    rig = Rig(block_size=4)
    lengths = rig.scheduler.admission.output_lengths[STANDARD]
    known = lengths.remaining(np.array([0, 1, 5]))
    whole = rig.submit([1] * 8, 0)
    sequence = rig.sequences[whole]
    assert (sequence.last_to_compute, sequence.will_decode) == (8, False)
    assert rig.scheduler.admission.foreseen_blocks([sequence], STANDARD, waits=True) == [2.0]
    rig.schedule()
    assert [(step.num_computed, step.num_new) for step in rig.plans[0].steps] == [(0, 8)]
    assert rig.schedule() is None, "nothing follows its prompt"
    assert rig.scheduler.finish(whole, rig.now_s)
    assert np.array_equal(lengths.remaining(np.array([0, 1, 5])), known)
    assert rig.stats.lanes[STANDARD].finished == 1
