"""What lanes, aging, reserves, fairness and deadlines promise, tested with the scheduler and the KV pool."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.rig import BLOCK_SIZE, Rig
from trunkline_worker.scheduler.limits import AdmissionRule
from trunkline_worker.scheduler.preemption import cheapest_victim
from trunkline_worker.scheduler.running_set import MAX_PREEMPTIONS_PER_STEP
from trunkline_worker.step.lanes import Lane

INTERACTIVE, STANDARD, BATCH = Lane
OPTIMISTIC = AdmissionRule.OPTIMISTIC


def admitted_order(rig: Rig) -> list[int]:
    return [start.sequence_id for plan in rig.plans for start in plan.starts]


def test_lanes_are_admitted_in_strict_order() -> None:
    rig = Rig(max_running=1)
    rig.submit([1], lane=BATCH)
    rig.step()
    low, middle, high = (rig.submit([n], lane=lane) for n, lane in ((2, BATCH), (3, STANDARD), (4, INTERACTIVE)))
    rig.run()
    assert admitted_order(rig).index(high) < admitted_order(rig).index(middle) < admitted_order(rig).index(low)


def test_an_interactive_request_takes_the_place_of_bulk_work_at_once() -> None:
    rig = Rig(max_running=2)
    bulk = [rig.submit([n], 50, lane=BATCH) for n in range(2)]
    rig.step()
    chat = rig.submit([7, 8], 3, lane=INTERACTIVE)
    rig.step()
    assert chat in {step.sequence_id for step in rig.plans[-1].steps}
    assert rig.stats.preemptions == 1
    rig.run()
    assert set(rig.finished) == {*bulk, chat}


def test_bulk_work_that_holds_the_pool_gives_way_to_an_interactive_request() -> None:
    rig = Rig(num_blocks=8, admission=OPTIMISTIC)
    rig.submit(list(range(BLOCK_SIZE * 7)), 4, lane=BATCH)
    rig.step()
    chat = rig.submit(list(range(100, 100 + BLOCK_SIZE * 4)), 2, lane=INTERACTIVE)
    rig.step()
    assert chat in {step.sequence_id for step in rig.plans[-1].steps}
    rig.run()
    assert len(rig.finished) == 2


def test_a_request_of_the_same_lane_never_preempts_at_admission() -> None:
    rig = Rig(max_running=1)
    rig.submit([1], 5)
    rig.step()
    rig.submit([2], 5)
    rig.run()
    assert rig.stats.preemptions == 0


def test_nothing_starves_a_low_lane_under_an_endless_stream_of_higher_ones() -> None:
    """The bound is aging, then the turns of older sequences; here it is alone, so its turn comes at once."""
    rig = Rig(max_running=2, aging_s=20.0)
    rig.submit([1], 5, lane=INTERACTIVE)
    patient = rig.submit([2, 3], 30, lane=BATCH)
    for n in range(200):
        rig.submit([n % 40], 6, lane=INTERACTIVE)
        rig.step()
        if patient in rig.finished:
            break
    assert patient in rig.finished
    assert rig.now_s <= 20 + 6 + 30 + 2, "aging, a free place, its own tokens"


def test_an_aged_sequence_keeps_its_blocks_while_higher_lanes_want_them() -> None:
    rig = Rig(num_blocks=12, max_running=4, aging_s=5.0, admission=OPTIMISTIC)
    aged = rig.submit([1, 2], 30, lane=BATCH)
    for n in range(300):
        if n % 2:
            rig.submit([n % 40, 1, 2, 3, 4, 5, 6, 7, 8], 9, lane=INTERACTIVE)
        rig.step()
        if aged in rig.finished:
            break
    assert aged in rig.finished
    assert rig.sequences[aged].generation <= 1 + 30 // rig.scheduler.limits.aged_tokens, (
        "preempted before it aged, if at all"
    )


@given(
    work=st.lists(st.tuples(st.sampled_from(Lane), st.integers(1, 30), st.integers(1, 20)), min_size=1, max_size=40),
    reserve=st.sampled_from([0.1, 0.3, 0.5]),
    num_blocks=st.integers(12, 40),
    rule=st.sampled_from(AdmissionRule),
)
@settings(max_examples=60, deadline=None)
def test_the_interactive_reserve_is_respected(
    work: list[tuple[Lane, int, int]], reserve: float, num_blocks: int, rule: AdmissionRule
) -> None:
    rig = Rig(
        num_blocks=num_blocks,
        max_running=10,
        max_step_tokens=40,
        interactive_reserve=reserve,
        admission=rule,
        aging_s=1e9,
    )
    limits = rig.scheduler.limits
    kept_blocks = int(num_blocks * reserve)
    for n, (lane, length, output) in enumerate(work):
        rig.submit([n] * length, output, lane=lane)
    while rig.scheduler.has_work:
        before = {s.sequence_id: len(s.block_table) for s in rig.scheduler.running}
        scheduled = rig.schedule()
        assert scheduled is not None
        lower_tokens = sum(
            step.num_new for step in scheduled[0].steps if rig.sequences[step.sequence_id].lane is not INTERACTIVE
        )
        assert lower_tokens <= limits.max_step_tokens - limits.reserved_step_tokens
        lower = [s for s in rig.scheduler.running if s.lane is not INTERACTIVE]
        assert len(lower) <= limits.max_running_requests - limits.reserved_running_requests
        took = [s for s in lower if len(s.block_table) > before.get(s.sequence_id, 0)]
        held = sum(len(s.block_table) for s in rig.scheduler.running if s.lane is INTERACTIVE)
        if took and len(lower) > 1:
            assert rig.blocks.num_available + held >= kept_blocks
        rig.commit(*scheduled)
    assert len(rig.finished) == len(work)


@pytest.mark.parametrize("weights", [(1.0, 1.0), (3.0, 1.0)])
def test_backlogged_tenants_share_by_weight_however_much_each_sends(weights: tuple[float, float]) -> None:
    rig = Rig(num_blocks=400, max_running=4)
    for n in range(1200):
        rig.submit([n % 50, n % 7], 6, tenant="many" if n % 11 else "few", weight=weights[bool(n % 11)])
    service = {"few": 0.0, "many": 0.0}
    for _ in range(200):
        rig.step()
    for sequence in rig.sequences.values():
        service[sequence.account.tenant] += sequence.num_output
    assert rig.sequences[1].account.waiting > 0, "both have more to do"
    shares = [service["few"] / weights[0], service["many"] / weights[1]]
    assert sum(shares) ** 2 / (2 * sum(share**2 for share in shares)) >= 0.98, shares


def test_fairness_is_work_conserving() -> None:
    rig = Rig(max_running=4)
    for _ in range(4):
        rig.submit([1, 2], 5, tenant="alone", weight=0.001)
    rig.step()
    assert len(rig.scheduler.running) == 4


def test_a_tenant_that_returns_has_not_saved_up_service() -> None:
    rig = Rig(max_running=1)
    for n in range(40):
        rig.submit([n], 4, tenant="steady")
    for _ in range(60):
        rig.step()
    late = [rig.submit([n], 4, tenant="late") for n in range(10)]
    done_before = len(rig.finished)
    for _ in range(24):
        rig.step()
    served = [n for n in rig.finished if n in late]
    assert 2 <= len(served) <= 4, "it shares from now on, and does not make up for its absence"
    assert len(rig.finished) - done_before == 6


def test_a_request_that_cannot_meet_its_deadline_is_refused_before_it_costs_anything() -> None:
    rig = Rig(max_running=1)
    rig.submit([1], 30)
    rig.step()
    hopeless = rig.submit([2], 2, within_s=3.0)
    for _ in range(5):
        rig.step()
    assert [s.sequence_id for s in rig.scheduler.refuse_hopeless(rig.now_s)] == [hopeless]
    rig.run()
    assert set(rig.finished) == {1}


def test_of_two_sequences_only_one_can_ever_evict_the_other() -> None:
    rig = Rig(num_blocks=6, max_running=4, admission=OPTIMISTIC)
    for n in range(4):
        rig.submit([n, n + 1], 20, lane=Lane(n % 3))
    evictions: set[tuple[int, int]] = set()
    while rig.scheduler.has_work:
        running = {s.sequence_id: s for s in rig.scheduler.running}
        scheduled = rig.schedule()
        assert scheduled is not None
        for gone in set(running) & set(scheduled[0].ended):
            if gone not in rig.finished:
                evictions |= {
                    (kept.sequence_id, gone) for kept in rig.scheduler.running if kept.rank < running[gone].rank
                }
        rig.commit(*scheduled)
    assert evictions
    assert not any((b, a) in evictions for a, b in evictions)


def test_the_victim_is_the_cheapest_of_the_lowest_lane() -> None:
    rig = Rig(num_blocks=200, max_running=8)
    for length, lane in ((3, INTERACTIVE), (30, BATCH), (9, BATCH), (2, STANDARD)):
        rig.submit([length] * length, 9, lane=lane)
    rig.step()
    victim = cheapest_victim(rig.scheduler.running, (INTERACTIVE, 1), lower_lanes_only=True)
    assert victim is not None
    assert victim.sequence_id == 3
    assert cheapest_victim(rig.scheduler.running, (BATCH, 3), lower_lanes_only=False) is None


def test_preemptions_of_one_step_are_bounded() -> None:
    rig = Rig(num_blocks=40, max_running=40, max_step_tokens=64, admission=OPTIMISTIC)
    for n in range(39):
        rig.submit([n], 30)
    before = 0
    while rig.scheduler.has_work:
        rig.step()
        assert rig.stats.preemptions - before <= MAX_PREEMPTIONS_PER_STEP
        before = rig.stats.preemptions
    assert before > 0


def test_foreseeing_admission_preempts_far_less_than_optimistic_admission() -> None:
    preemptions = {}
    for rule in AdmissionRule:
        rig = Rig(num_blocks=60, max_running=32, max_step_tokens=128, admission=rule)
        for n in range(300):
            rig.submit([n % 50, n % 3], 5 + n % 40)
        rig.run(most_steps=50_000)
        preemptions[rule] = rig.stats.preemptions
    assert preemptions[AdmissionRule.PREDICTED] < preemptions[OPTIMISTIC] / 3, preemptions
