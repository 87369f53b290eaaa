"""The tenants of one lane share places, KV blocks and the time of a step: docs/fairness.md."""

from dataclasses import replace
from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.rig import Rig
from trunkline_worker.scheduler.admission import Admission
from trunkline_worker.scheduler.limits import AdmissionRule
from trunkline_worker.scheduler.sequence_table import StepOutput
from trunkline_worker.scheduler.shares import may_take
from trunkline_worker.scheduler.step_cost import STEPS_PER_FIT, Experience, Size
from trunkline_worker.step.fair_share import NEWCOMERS_FIRST, Accounts
from trunkline_worker.step.lanes import Lane, QueueBounds
from trunkline_worker.step.plan import StepPlan, StepResult

INTERACTIVE, STANDARD, BATCH = Lane
PLENTY = 1024  # blocks


def with_cost(rig: Rig, *, fixed_s: float, token_s: float) -> Rig:
    """A rig whose scheduler knows what steps cost."""
    cost = rig.scheduler.cost
    cost.fixed_s, cost.token_s, cost._seen = fixed_s, token_s, STEPS_PER_FIT
    cost.experience = Experience(trusted=Size(inf, inf, inf))
    cost.observe = lambda load, time_s, *, is_rehearsed=False: None  # type: ignore[method-assign]
    return rig


def flooded(rig: Rig, *, prompt: int, output: int, count: int = 100, lane: Lane = STANDARD) -> Rig:
    """A rig that one tenant has filled."""
    for n in range(count):
        rig.submit([n % 50, n // 50] + [7] * (prompt - 2), output, lane=lane, tenant="flood")
    for _ in range(12):
        rig.step()
    assert rig.sequences[1].account.waiting, "it has more than fits"
    return rig


def steps_to_first_token(rig: Rig, sequence_id: int) -> int:
    before = len(rig.outputs[sequence_id])
    for steps in range(1, 500):
        rig.step()
        if len(rig.outputs[sequence_id]) > before:
            return steps
    raise AssertionError("its first token never came")


def full_of_places() -> Rig:
    return flooded(Rig(max_running=16, num_blocks=PLENTY), prompt=4, output=200)


def full_of_blocks() -> Rig:
    return flooded(Rig(max_running=64, num_blocks=200), prompt=40, output=300)


def full_of_decodes() -> Rig:
    rig = Rig(max_running=64, num_blocks=4 * PLENTY, itl_target_s=10.0)
    return flooded(with_cost(rig, fixed_s=1.0, token_s=0.3), prompt=4, output=200)


@pytest.mark.parametrize("lane", Lane)
@pytest.mark.parametrize("rule", AdmissionRule)
@pytest.mark.parametrize("run_ahead", [0, 1])
def test_a_newcomer_gets_a_place_where_one_tenant_holds_them_all(
    lane: Lane, rule: AdmissionRule, run_ahead: int
) -> None:
    rig = Rig(max_running=16, num_blocks=PLENTY, admission=rule, run_ahead=run_ahead)
    flooded(rig, prompt=4, output=200, lane=lane)
    newcomer = rig.submit([49, 48, 47], 5, lane=lane, tenant="newcomer")
    assert steps_to_first_token(rig, newcomer) <= 2 + run_ahead


@pytest.mark.parametrize("make", [full_of_places, full_of_blocks, full_of_decodes])
@pytest.mark.parametrize("output", [1, 5, 60])
def test_a_newcomer_within_its_share_does_not_wait_for_another_sequence_to_end(make: object, output: int) -> None:
    rig = make()  # type: ignore[operator]
    newcomer = rig.submit([49, 48, 47], output, tenant="newcomer")
    assert steps_to_first_token(rig, newcomer) <= 2
    while newcomer not in rig.finished:
        rig.step()
    assert rig.sequences[newcomer].generation == 0, "and it is not preempted for those whose share it took"


@given(
    weights=st.tuples(st.sampled_from([0.5, 1.0, 3.0]), st.sampled_from([0.5, 1.0, 3.0])),
    make=st.sampled_from([full_of_places, full_of_blocks]),
    output=st.sampled_from([1, 30]),
)
@settings(max_examples=10, deadline=None)
def test_each_tenant_gets_its_weighted_share_at_once_and_no_more(
    weights: tuple[float, float], make: object, output: int
) -> None:
    rig = make()  # type: ignore[operator]
    rig.scheduler.waiting.lanes[STANDARD].account("flood", weights[0])
    for n in range(40):
        rig.submit([n, 49, 48, 47], output, tenant="newcomer", weight=weights[1])
    account = rig.sequences[max(rig.sequences)].account
    share = weights[1] / sum(weights)
    most, places = 0, rig.scheduler.admission.places(STANDARD)
    for _ in range(12):
        rig.step()
        most = max(most, account.running)
        rig.scheduler.check_integrity()
    assert most <= max(share, 2 / 3) * places + 1, "of two tenants with a backlog neither has the other's share"
    assert rig.sequences[1].account.running > 0


def test_a_tenants_only_sequence_is_not_taken_for_another_that_is_no_smaller() -> None:
    rig = Rig(max_running=1)
    rig.submit([1], 40, tenant="first")
    rig.step()
    rig.submit([2], 40, tenant="second")
    rig.run()
    assert rig.stats.preemptions == 0


def test_what_was_preempted_does_not_stand_before_other_tenants() -> None:
    rig = full_of_places()
    newcomers = [rig.submit([49, 48, n], 3, tenant=f"newcomer {n}") for n in range(4)]
    for _ in range(3):
        rig.step()
    assert rig.stats.preemptions > 0
    assert all(rig.outputs[n] for n in newcomers)
    late = rig.submit([40, 41], 3, tenant="late")
    assert steps_to_first_token(rig, late) <= 2
    assert rig.sequences[1].account.returning, "those that gave way still wait"


def test_a_short_prompt_does_not_wait_for_the_end_of_another_tenants_long_one() -> None:
    rig = Rig(num_blocks=PLENTY, max_step_tokens=64)
    long = [rig.submit([n] * 1200, 4, tenant="long") for n in range(3)]
    for _ in range(5):
        rig.step()
    for n in range(5):
        short = rig.submit([40 + n] * 30, 4, tenant="short")
        assert steps_to_first_token(rig, short) <= 2
    rig.run()
    assert list(rig.finished)[-3:] == long, "those of one tenant in their order"


def test_a_tenant_that_comes_back_goes_before_one_that_has_just_been_served() -> None:
    rig = Rig(num_blocks=400, max_step_tokens=64)
    for n in range(3):
        rig.submit([n] * 1200, 4, tenant="long")  # two of them wait
    for _ in range(3):
        rig.step()
    for n in range(5):
        rig.step()
        assert steps_to_first_token(rig, rig.submit([40 + n] * 10, 1, tenant="short")) == 1


def test_tenants_that_keep_coming_do_not_hold_up_one_that_waits_level_with_them() -> None:
    accounts = Accounts(STANDARD)
    first = accounts.account("first", 1.0)
    accounts.join(first, 8)
    accounts.line_up(first)
    first.input_tokens += 8
    for n in range(100):
        newcomer = accounts.account(f"newcomer {n}", 1.0)
        accounts.join(newcomer, 8)
        accounts.line_up(newcomer)
        served = accounts.next()
        assert served is not None
        if served is first:
            break
        served.input_tokens += 8
        accounts.step_out(served)
        accounts.leave(served, 8)
    assert 0 < n <= NEWCOMERS_FIRST


def test_a_long_prompt_of_a_tenant_alone_is_computed_as_fast_as_ever() -> None:
    rig = Rig(num_blocks=PLENTY, max_step_tokens=64)
    for n in range(3):
        rig.submit([n] * 640, 1, tenant="long")
    rig.run()
    assert [plan.num_tokens for plan in rig.plans] == [64] * 30


def test_an_aged_long_prompt_takes_no_more_than_its_part_of_a_steps_time() -> None:
    rig = Rig(num_blocks=PLENTY, max_step_tokens=4096, itl_target_s=0.5, aging_s=10.0)
    with_cost(rig, fixed_s=0.1, token_s=2e-3)  # 200 tokens in a step
    rig.submit([1] * 3_900, 4, tenant="long")
    for _ in range(12):
        rig.step()
    for n in range(3):
        short = rig.submit([40 + n] * 10, 1, tenant="short")
        assert steps_to_first_token(rig, short) <= 2


def test_many_that_wait_for_one_prefix_hide_no_other_tenant() -> None:
    rig = Rig(num_blocks=PLENTY, max_running=64, max_step_tokens=64)
    base = [n % 37 for n in range(1000)]
    for n in range(300):
        rig.submit([*base, n % 50], 4, tenant="flood")
    for _ in range(3):
        rig.step()
    assert steps_to_first_token(rig, rig.submit([49, 48], 1, tenant="newcomer")) <= 2


def test_a_head_of_line_too_large_for_its_tenant_hides_no_sequence_behind_it() -> None:
    rig = Rig(num_blocks=100, max_running=16, max_step_tokens=512)
    for n in range(4):
        rig.submit([n] * 60, 40, tenant="flood")
    rig.step()
    rig.submit([9] * 360, 4, tenant="giant")  # 90 of 100 blocks
    rig.step()
    newcomer = rig.submit([49, 48], 4, tenant="newcomer")
    assert steps_to_first_token(rig, newcomer) <= 2
    rig.run()
    assert len(rig.finished) == 6


def test_a_tenant_beyond_its_share_does_not_grow_at_the_cost_of_one_within_it() -> None:
    rig = Rig(num_blocks=40, max_running=8, admission=AdmissionRule.OPTIMISTIC)
    for n in range(6):
        rig.submit([n] * 8, 100, tenant="flood")
    for _ in range(4):
        rig.step()
    young = rig.submit([30] * 8, 30, tenant="young")
    rig.run()
    assert rig.stats.preemptions > 0
    assert rig.sequences[young].generation == 0


def test_steps_are_not_stretched_where_another_tenant_comes_and_goes() -> None:
    rig = full_of_decodes()
    while rig.now_s < 90:  # five target times and more: alone, the tenant may have steps stretched
        rig.step()
    stretched = len(rig.scheduler.running)
    newcomer = rig.submit([49, 48], 40, tenant="newcomer")
    while newcomer not in rig.finished:
        rig.step()
    assert len(rig.scheduler.running) < stretched / 2, "(10 - 1) / 2 / 0.3: half of a step's time"


@given(
    demands=st.lists(st.tuples(st.integers(0, 5), st.floats(0.001, 0.6)), min_size=1, max_size=24),
    weights=st.lists(st.sampled_from([0.2, 1.0, 5.0]), min_size=6, max_size=6),
    newcomers=st.lists(st.tuples(st.integers(0, 5), st.floats(0.001, 0.6)), min_size=1, max_size=12),
    has_right=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_levels_converge_and_preemptions_end_for_any_mix_of_tenants(
    demands: list[tuple[int, float]], weights: list[float], newcomers: list[tuple[int, float]], has_right: bool
) -> None:
    """Preempted sequences queue up again, yet no preemption is reversed."""
    held: list[list[float]] = [[] for _ in weights]
    for tenant, demand in demands:
        held[tenant].append(demand)
    fair = 1.0 / sum(weights)

    def level(tenant: int, more: float = 0.0) -> float:
        return (sum(held[tenant]) + more) / weights[tenant]

    def levels() -> list[float]:
        return sorted((level(tenant) for tenant in range(6)), reverse=True)

    queue, exchanges, idle = list(newcomers), 0, 0
    while queue and idle < len(queue):
        tenant, demand = queue.pop(0)
        idle += 1
        for victim in sorted(range(6), key=lambda other: -level(other)):
            if victim == tenant or not held[victim]:
                continue
            gives = min(held[victim])
            with_newcomer = level(tenant, demand)
            right = has_right and with_newcomer <= fair
            if may_take(with_newcomer, level(victim), level(victim, -gives), fair, has_right=right):
                before = levels()
                held[victim].remove(gives)
                held[tenant].append(demand)
                assert [round(x, 9) for x in levels()] <= [round(x, 9) for x in before]
                assert max(level(tenant), level(victim)) < max(before) + 1e-12
                queue.append((victim, gives))
                exchanges, idle = exchanges + 1, 0
                break
        else:
            queue.append((tenant, demand))
        assert exchanges <= 40 * 80, "it comes to an end"


def test_a_queue_that_one_tenant_fills_refuses_no_other_tenant_in_any_lane() -> None:
    bounds = QueueBounds(max_requests=100, max_tokens=10_000)
    rig = Rig(max_running=1)
    rig.submit([1], 500, tenant="flood", lane=INTERACTIVE)
    rig.step()
    for n in range(100):
        rig.submit([n % 50], 5, tenant="flood", lane=INTERACTIVE)
    waiting = rig.scheduler.waiting

    def admits(tenant: str, lane: Lane) -> bool:
        account = waiting.lanes[lane].account(tenant, 1.0)
        of_tenant, tokens = waiting.queued_by(account)
        return bounds.admits(
            lane,
            10,
            waiting=waiting.count,
            waiting_tokens=waiting.num_tokens,
            of_tenant=of_tenant,
            tokens_of_tenant=tokens,
            share=waiting.queue_share(account),
        )

    for lane in Lane:
        assert admits("innocent", lane)
        assert not admits("flood", lane), "nor is there more room for it in another lane"


def test_another_tenants_queue_does_not_make_a_deadline_hopeless() -> None:
    rig = Rig(max_running=4)
    for n in range(400):
        rig.submit([n % 50, n // 50], 20, tenant="flood", within_s=1e5)
    for _ in range(50):
        rig.step()
    scheduler = rig.scheduler
    for tenant, at_most_s in (("newcomer", 1.0), ("flood", 1e5)):
        sequence = rig.sequences[rig.submit([49, 48], 1, tenant=tenant, within_s=1e6)]
        scheduler.abort(sequence.sequence_id, rig.now_s)
        wait_s = scheduler.drain_rate.wait_s(sequence, scheduler.waiting, rig.now_s)
        assert wait_s <= at_most_s
    assert wait_s > 100.0


def test_aged_sequences_of_a_lane_are_of_one_tenant_after_the_other() -> None:
    rig = Rig(max_running=2, aging_s=10.0, aged_tokens=4)
    for n in range(20):
        rig.submit([n, 3], 12, tenant="flood", lane=BATCH)
    other = rig.submit([49, 48], 4, tenant="other", lane=BATCH)
    for n in range(60):
        rig.submit([n % 40], 6, lane=INTERACTIVE)
        rig.submit([n % 40, 1], 6, lane=INTERACTIVE)
        rig.step()
    assert rig.sequences[other].admitted_s is not None, "the second aged one at the latest"


@pytest.mark.parametrize("rule", AdmissionRule)
@pytest.mark.parametrize("tenants", [7, 9, 30])
def test_tenants_that_wait_for_much_do_not_hide_a_newcomer(tenants: int, rule: AdmissionRule) -> None:
    """Each of them waits for one sequence that is larger than its share, and has had no service yet."""
    rig = flooded(Rig(max_running=64, num_blocks=200, admission=rule, max_step_tokens=64), prompt=40, output=300)
    for number in range(tenants):
        rig.submit([number, 1, 2] + [9] * 497, 200, tenant=f"large {number}")
    for _ in range(6):
        rig.step()
    newcomer = rig.submit([49, 48, 47], 1, tenant="newcomer")
    assert steps_to_first_token(rig, newcomer) <= 2


def test_a_request_of_one_token_does_not_wait_for_a_pool_that_others_are_forecast_to_fill() -> None:
    rig = Rig(max_running=64, num_blocks=400, max_step_tokens=1024)
    for _ in range(100):
        rig.scheduler.admission.output_lengths[STANDARD].observe(4)
    for n in range(60):  # they turn out ten times as long
        rig.submit([n, *range(7)], 40, tenant="flood")
    for _ in range(16):
        rig.step()
    assert rig.blocks.num_available > len(rig.scheduler.running) + 2, "there is room now"
    preemptions = rig.stats.preemptions
    newcomer = rig.submit([1, 2, 3, 4, 5], 1, tenant="newcomer")
    assert steps_to_first_token(rig, newcomer) <= 2
    assert rig.stats.preemptions == preemptions


def test_a_step_that_brings_a_tenant_its_only_first_token_is_a_quarter_as_long() -> None:
    rig = Rig(num_blocks=PLENTY, block_size=16, max_step_tokens=4096, max_running=64, itl_target_s=0.1)
    with_cost(rig, fixed_s=0.01, token_s=1e-4)  # 900 tokens in a step
    flooded(rig, prompt=1000, output=4, count=64)
    newcomer = rig.submit([200], 1, tenant="newcomer")
    assert steps_to_first_token(rig, newcomer) == 1
    assert 200 < rig.plans[-1].num_tokens < 250
    rig.step()
    assert 850 < rig.plans[-1].num_tokens < 950, "others are not slowed down for longer"


@pytest.mark.parametrize(
    "arrivals",
    [
        # Two tenants that take from each other.
        [
            ([0, 0, 0, 1, 0, 0], 3, "b", STANDARD, 2),
            ([1, 0, 0, 1, 0], 4, "a", STANDARD, 2),
            ([1, 0], 3, "b", STANDARD, 4),
        ],
        # The same after an interactive sequence.
        [([1], 5, "a", INTERACTIVE, 5), ([1, 1], 3, "a", STANDARD, 4), ([1], 3, "b", STANDARD, 6)],
        # The lower lane gives way to an interactive sequence, and is shared out before its blocks are free.
        [
            ([0], 8, "b", STANDARD, 5),
            ([1, 1, 1], 3, "b", STANDARD, 0),
            ([1, 1, 0, 1, 0, 0], 3, "a", INTERACTIVE, 6),
            ([1, 1, 1, 1], 4, "a", STANDARD, 4),
        ],
    ],
    ids=["two tenants", "two tenants after another", "two lanes"],
)
def test_sequences_that_take_blocks_from_each_other_advance_all_the_same(
    arrivals: list[tuple[list[int], int, str, Lane, int]],
) -> None:
    """Steps run ahead, so a sequence may lose its blocks before its first token is known."""
    rig = Rig(num_blocks=9, block_size=1, max_step_tokens=20, run_ahead=2, max_running=6)
    for prompt, max_tokens, tenant, lane, steps in arrivals:
        rig.submit(prompt, max_tokens, tenant=tenant, lane=lane)
        for _ in range(steps):
            rig.step()
    rig.run(most_steps=100)
    assert len(rig.finished) == len(arrivals)


def test_tenants_with_short_prompts_and_long_outputs_do_not_hide_one_within_its_share() -> None:
    """By their prompts alone the long ones seem to be within theirs."""
    rig = Rig(num_blocks=64, block_size=4, max_step_tokens=64, max_running=64)
    rig.submit(list(range(40)), 1, tenant="small")
    while rig.scheduler.has_work or rig.in_flight:
        rig.step()
    for number in range(8):
        rig.submit([number] * 8, 80, tenant="hog")
    for _ in range(3):
        rig.step()
    for number in range(12):
        for one in range(2):
            rig.submit([number, one, 7, 7], 100, tenant=f"long {number}")
    waits = []
    for number in range(30):
        asked = rig.submit([100 + number, 8, 8, 8], 1, tenant="small")
        waits.append(0)
        while asked not in rig.finished:
            rig.step()
            waits[-1] += 1
            assert waits[-1] <= 20
    assert max(waits) <= 10


class Quick(Rig):
    """Its steps take a hundredth of a second, so that waiting sequences are seldom looked at for the time's sake."""

    def commit(self, plan: StepPlan, result: StepResult) -> list[StepOutput]:
        self.now_s -= 0.99
        return super().commit(plan, result)


@pytest.mark.parametrize("seed", range(8))
def test_short_requests_do_not_wait_for_a_pool_that_others_are_forecast_to_fill(seed: int) -> None:
    """A newcomer may fit before the others take the blocks that they need in its step, and again in the next one."""
    draw = Random(seed)
    rig = Quick(num_blocks=draw.choice([160, 256]), block_size=draw.choice([2, 4, 8]), max_step_tokens=256)
    for _ in range(40):
        prompt = [draw.randrange(50) for _ in range(draw.randrange(8, 60))]
        rig.submit(prompt, draw.choice([200, 400]), tenant="hog")
    for _ in range(3):
        rig.step()
    for number in range(60):
        output = draw.choice([1, 3, 6])
        asked, num_steps = rig.submit([100 + number, 8, 8], output, tenant="small"), 0
        while asked not in rig.finished:
            rig.step()
            num_steps += 1
            assert num_steps <= output + 10
        for _ in range(draw.randrange(6)):
            rig.step()


@pytest.mark.parametrize(("chunk", "fits"), [(64, True), (3, False)])
def test_the_others_growth_counts_while_a_short_requests_prompt_is_computed(chunk: int, fits: bool) -> None:
    rig = Rig(num_blocks=80, block_size=4, max_step_tokens=256, max_running=64)
    for _ in range(100):
        rig.scheduler.admission.output_lengths[STANDARD].observe(4)
    for number in range(12):  # they turn out longer
        rig.submit([number] * 9, 60, tenant="hog")
    for _ in range(6):
        rig.step()
    limits = replace(rig.scheduler.limits, max_step_tokens=chunk)
    admission = Admission(limits, rig.blocks, rig.scheduler.cost)
    newcomer = rig.sequences[rig.submit([50 + number for number in range(88)], 2, tenant="small")]
    rig.blocks.match(newcomer)
    assert admission.has_room_now(newcomer, rig.scheduler.running)
    assert admission.has_blocks(newcomer, rig.scheduler.running) is fits
