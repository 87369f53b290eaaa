"""Sequences that await a resource: they wait outside the batch, and with all rights of the queue."""

import time
from collections.abc import Callable

import pytest

from tests.worker.engine_rig import make_submit
from tests.worker.rig import Rig
from trunkline.status import CODE_INTERNAL, INTERNAL, RequestRefused
from trunkline_bench.engine.host_time import InstantExecutor
from trunkline_worker.cache.blocks import KVBlocks
from trunkline_worker.cache.prefix_tree import PrefixTree
from trunkline_worker.cache.sequence import AwaitedResource
from trunkline_worker.engine.engine import Engine, ModelLimits
from trunkline_worker.engine.engine_process import idle_s, run
from trunkline_worker.engine.messages import Prompt
from trunkline_worker.scheduler.limits import AdmissionRule, Batching, SchedulerLimits
from trunkline_worker.scheduler.scheduler import Scheduler
from trunkline_worker.scheduler.stats import EngineStats
from trunkline_worker.step.fair_share import MAX_IDLE_ACCOUNTS
from trunkline_worker.step.lanes import Lane

GRAMMAR, ADAPTER = AwaitedResource("grammar", b"digest"), AwaitedResource("adapter", b"name, version 2")


def order(rig: Rig) -> list[int]:
    """Sequences as they were first computed."""
    return list(dict.fromkeys(step.sequence_id for plan in rig.plans for step in plan.steps))


def test_a_sequence_takes_the_place_of_its_arrival_once_the_last_resource_is_there() -> None:
    rig = Rig(max_running=1)
    running = rig.submit([1], 3)
    rig.step()
    first = rig.submit([2], 2, awaits=[GRAMMAR, ADAPTER])
    second = rig.submit([3], 2, awaits=[GRAMMAR])
    third = rig.submit([4], 2)
    rig.scheduler.ready(ADAPTER, rig.now_s)
    assert rig.scheduler.waiting.num_ready == 1
    rig.scheduler.ready(GRAMMAR, rig.now_s)
    rig.run()
    assert order(rig) == [running, first, second, third]


def test_others_are_not_held_up() -> None:
    rig = Rig(max_running=1)
    awaits = rig.submit([1], 2, awaits=[GRAMMAR])
    other = rig.submit([2], 2)
    while rig.can_step:
        rig.step()
    assert order(rig) == [other]
    rig.scheduler.ready(ADAPTER, rig.now_s)
    assert not rig.can_step, "it is another resource that is there"
    rig.scheduler.ready(GRAMMAR, rig.now_s)
    rig.run()
    assert order(rig) == [other, awaits]


def test_a_resource_that_fails_ends_those_that_await_it_and_no_others() -> None:
    rig = Rig()
    both = rig.submit([1], 2, awaits=[GRAMMAR, ADAPTER])
    one = rig.submit([2], 2, awaits=[GRAMMAR])
    other = rig.submit([3], 2, awaits=[ADAPTER])
    failed = rig.scheduler.failed(GRAMMAR, rig.now_s)
    assert [sequence.sequence_id for sequence in failed] == [both, one]
    rig.scheduler.check_integrity()
    rig.scheduler.ready(ADAPTER, rig.now_s)
    rig.run()
    assert order(rig) == [other]


def test_a_preempted_sequence_may_await_its_blocks() -> None:
    rig = Rig(num_blocks=4, block_size=2, admission=AdmissionRule.OPTIMISTIC)
    older, younger = rig.submit([1], 6), rig.submit([2], 6)
    while not rig.stats.preemptions:
        rig.step()
    rig.scheduler.await_resource(younger, GRAMMAR, rig.now_s)
    while rig.can_step:
        rig.step()
    assert list(rig.finished) == [older]
    rig.scheduler.check_integrity()
    rig.scheduler.ready(GRAMMAR, rig.now_s)
    rig.run()
    assert list(rig.finished) == [older, younger]


def test_one_that_stood_in_the_way_lets_the_next_one_go() -> None:
    rig = Rig(num_blocks=4, block_size=2, max_running=2)
    rig.submit([1, 2], 5)
    rig.step()
    large, small = rig.submit([3] * 7, 1), rig.submit([4], 1)
    rig.step()
    assert rig.scheduler.is_blocked
    rig.scheduler.await_resource(large, GRAMMAR, rig.now_s)
    rig.step()
    assert rig.sequences[small].admitted_s is not None


def test_a_sequence_that_becomes_ready_is_looked_at_although_none_fitted_before() -> None:
    rig = Rig(num_blocks=4, block_size=2)
    rig.submit([1, 2], 5)
    rig.step()
    small = rig.submit([4], 1, lane=Lane.INTERACTIVE, awaits=[GRAMMAR])
    rig.submit([3] * 7, 1)
    rig.step()
    assert rig.scheduler.is_blocked
    rig.scheduler.ready(GRAMMAR, rig.now_s)
    rig.step()
    assert rig.sequences[small].admitted_s is not None


def test_places_kept_for_a_higher_lane_are_not_kept_while_it_awaits_a_resource() -> None:
    rig = Rig(max_running=5, interactive_reserve=0.2)
    for n in range(4):
        rig.submit([n] * 8, 30, tenant="a")
    rig.step()
    urgent = rig.submit([5], 4, lane=Lane.INTERACTIVE, awaits=[GRAMMAR])
    rig.scheduler._preemption._expected[Lane.INTERACTIVE] = rig.sequences[urgent]
    newcomer = rig.submit([6], 4, tenant="b")
    rig.step()
    assert rig.sequences[newcomer].admitted_s is not None


def test_room_that_other_tenants_gave_up_is_not_taken_by_a_sequence_that_awaits_a_resource() -> None:
    rig = Rig(max_running=4)
    for n in range(3):
        rig.submit([n] * 8, 30, tenant="a")
    rig.submit([4] * 8, 30, tenant="b")
    rig.step()
    second, _ = rig.submit([5], 4, tenant="b", awaits=[GRAMMAR]), rig.submit([6], 4, tenant="b")
    rig.scheduler._sharing._expected[Lane.STANDARD] = rig.sequences[second]
    rig.step()
    assert rig.sequences[second].admitted_s is None


def test_a_member_of_a_batch_may_await_a_resource_before_it_has_joined() -> None:
    rig = Rig(batching=Batching.STATIC_UNPADDED, batch_size=2, max_step_tokens=4)
    first, second, third = rig.submit([1] * 4, 6), rig.submit([2] * 4, 2), rig.submit([3], 2)
    rig.step()
    assert [sequence.sequence_id for sequence in rig.scheduler.running] == [first]
    rig.scheduler.await_resource(second, GRAMMAR, rig.now_s)
    while rig.can_step:
        rig.step()
    assert list(rig.finished) == [first, third]
    rig.scheduler.ready(GRAMMAR, rig.now_s)
    rig.run()


def test_an_account_with_sequences_that_await_a_resource_is_not_forgotten() -> None:
    rig = Rig()
    rig.submit([1], 1, tenant="awaiting", awaits=[GRAMMAR])
    lane = rig.scheduler.waiting.lanes[Lane.STANDARD]
    for n in range(MAX_IDLE_ACCOUNTS):
        lane.account(f"idle {n}", 1.0)
    rig.scheduler.check_integrity()
    assert lane.account("awaiting", 1.0) is rig.sequences[1].account
    rig.scheduler.ready(GRAMMAR, rig.now_s)
    rig.run()


def test_what_awaits_a_resource_does_not_count_in_the_time_that_a_request_will_wait() -> None:
    waits_s = []
    for awaiting in (0, 5):
        rig = Rig(max_running=1)
        for n in range(6):
            rig.submit([n], 2)
        for n in range(awaiting):
            rig.submit([n], 2, awaits=[GRAMMAR])
        for _ in range(6):
            rig.step()
        deadlined = rig.sequences[rig.submit([9], 2, within_s=500.0, awaits=[GRAMMAR])]
        rig.scheduler.abort(deadlined.sequence_id, rig.now_s)
        waits_s.append(rig.scheduler.drain_rate.wait_s(deadlined, rig.scheduler.waiting, rig.now_s))
    assert waits_s[0] == waits_s[1] > 0.0


def test_the_time_that_a_sequence_awaited_resources_is_told_when_it_is_admitted() -> None:
    rig = Rig(max_running=1)
    running = rig.submit([1], 8)
    awaits, other = rig.submit([2], 1, awaits=[GRAMMAR, ADAPTER]), rig.submit([3], 1)
    for resource in (GRAMMAR, ADAPTER):
        rig.step()
        rig.scheduler.ready(resource, rig.now_s)
    rig.step()
    rig.scheduler.await_resource(awaits, GRAMMAR, rig.now_s)
    rig.step()
    rig.scheduler.ready(GRAMMAR, rig.now_s)
    rig.run()
    told = {handle: awaited_s for handle, _, awaited_s in rig.scheduler.take_admitted()}
    assert told == {running: 0.0, awaits: 3.0, other: 0.0}


def test_a_tenant_gains_no_service_from_sequences_that_await_a_resource() -> None:
    rig = Rig(max_running=1)
    rig.submit([1], 40, tenant="busy")
    rig.submit([2] * 30, 1, tenant="awaiting", awaits=[GRAMMAR])
    for _ in range(40):
        rig.step()
    lane = rig.scheduler.waiting.lanes[Lane.STANDARD]
    assert not lane.is_contended
    following = rig.submit([3], 1, tenant="busy")
    newcomer = rig.submit([4], 1, tenant="newcomer")
    rig.scheduler.ready(GRAMMAR, rig.now_s)
    busy, awaiting, new = (lane.account(name, 1.0).virtual_tokens for name in ("busy", "awaiting", "newcomer"))
    assert busy == awaiting == new
    rig.run()
    assert order(rig)[1:] == [following, newcomer, 2]


def test_a_tenant_with_running_sequences_gains_no_service_either() -> None:
    rig = Rig(num_blocks=200, max_running=3)
    rig.submit([1], 60, tenant="awaiting")
    rig.submit([2], 1, tenant="awaiting", awaits=[GRAMMAR])
    for n in range(20):
        rig.submit([3 + n] * 30, 1, tenant="busy")
    for _ in range(5):
        rig.step()
    lane = rig.scheduler.waiting.lanes[Lane.STANDARD]
    awaiting, busy = (lane.account(name, 1.0) for name in ("awaiting", "busy"))
    assert awaiting.virtual_tokens < busy.virtual_tokens
    rig.scheduler.ready(GRAMMAR, rig.now_s)
    assert awaiting.virtual_tokens == busy.virtual_tokens


def test_time_awaiting_a_resource_makes_no_lane_overdue_and_ages_no_sequence() -> None:
    rig = Rig(max_running=1, aging_s=5.0, itl_target_s=0.1)
    running = rig.submit([1], 30, lane=Lane.INTERACTIVE)
    awaits = rig.submit([2], 1, lane=Lane.BATCH, awaits=[GRAMMAR])
    for _ in range(10):
        rig.step()
    waiting = rig.scheduler.waiting
    assert waiting.oldest_s(Lane.BATCH) is None
    assert rig.scheduler.wakes_s() is None
    rig.scheduler.ready(GRAMMAR, rig.now_s)
    assert waiting.neglected_since_s(Lane.BATCH) == rig.now_s
    assert rig.scheduler.wakes_s() == rig.now_s + 5.0
    rig.run()
    assert list(rig.finished) == [running, awaits]


def test_retry_delays_count_no_time_in_which_all_sequences_await_a_resource() -> None:
    rig = Rig(max_running=1)
    rig.submit([1], 4)
    rig.submit([2], 1)
    rig.submit([3], 1, awaits=[GRAMMAR])
    while rig.can_step:
        rig.step()
    before_s = rig.scheduler.drain_rate.retry_delay_s(Lane.STANDARD, [0, 1, 0], rig.now_s)
    assert not rig.scheduler.drain_rate.is_queueing(Lane.STANDARD)
    assert rig.scheduler.drain_rate.retry_delay_s(Lane.STANDARD, [0, 1, 0], rig.now_s + 100.0) == before_s


def test_a_static_batch_forms_without_it() -> None:
    rig = Rig(batching=Batching.STATIC_UNPADDED, batch_size=2)
    awaits, *others = rig.submit([1], 2, awaits=[GRAMMAR]), rig.submit([2], 2), rig.submit([3], 2)
    rig.step()
    assert [sequence.sequence_id for sequence in rig.scheduler.running] == others
    rig.scheduler.ready(GRAMMAR, rig.now_s)
    rig.run()
    assert order(rig) == [*others, awaits]


def test_a_dynamic_batch_opens_for_ready_sequences_alone() -> None:
    rig = Rig(batching=Batching.DYNAMIC, batch_size=3, batch_window_s=10.0)
    rig.submit([1], 2, awaits=[GRAMMAR])
    rig.submit([2], 2, awaits=[GRAMMAR])
    assert rig.scheduler.wakes_s() is None
    rig.now_s = 3.0
    rig.submit([3], 2)
    assert rig.scheduler.wakes_s() == 13.0
    assert rig.schedule() is None, "the batch is not full"


# The engine


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def an_engine(clock: Callable[[], float], **limits: object) -> Engine:
    scheduler = Scheduler(
        SchedulerLimits(**limits),  # type: ignore[arg-type]
        KVBlocks(64, PrefixTree("model", 16)),
        EngineStats(0.0),
    )
    return Engine(scheduler, InstantExecutor(0), ModelLimits(256, frozenset()), clock)


def submit(
    engine: Engine, handle: int, *, tenant: str = "", timeout_s: float | None = None, ready: bool = False
) -> None:
    one = make_submit(handle, [handle], max_tokens=2)
    one.tenant = tenant
    if timeout_s is not None:
        one.timeout.FromNanoseconds(int(timeout_s * 1e9))
    engine.submit(one, Prompt([handle]), frozenset() if ready else frozenset({GRAMMAR}))


def test_an_engine_sleeps_while_all_requests_await_a_resource() -> None:
    engine = an_engine(Clock())
    submit(engine, 1)
    assert engine.step() is None
    assert engine.has_work
    assert idle_s(engine) is None
    assert engine.load().waiting == 1
    engine.ready(GRAMMAR)
    step = engine.step()
    assert step is not None
    assert step.admitted_handles == [1]


def test_an_engine_wakes_for_a_deadline_and_refuses() -> None:
    clock = Clock()
    engine = an_engine(clock)
    submit(engine, 1, timeout_s=5.0)
    assert engine.step() is None
    assert engine.wakes_s() == 5.0
    clock.now_s = 5.1
    step = engine.step()
    assert step is not None
    assert step.outputs[0].HasField("error")
    assert not engine.has_work


def test_an_engine_refuses_what_awaits_a_resource_that_failed() -> None:
    engine = an_engine(Clock())
    submit(engine, 1)
    submit(engine, 2, ready=True)
    engine.failed(GRAMMAR, RequestRefused(CODE_INTERNAL, INTERNAL, "the grammar took too long to compile"), "a trace")
    assert engine.has_reports
    step = engine.step()
    assert step is not None
    assert [output.handle for output in step.outputs if output.HasField("error")] == [1]
    assert "took too long" in step.outputs[0].error.message
    assert step.outputs[0].trace == "a trace"
    assert engine.has_work


def test_requests_that_await_a_resource_count_in_the_bounds_of_the_queue() -> None:
    engine = an_engine(Clock(), max_waiting_requests=4)
    for handle in range(1, 7):
        submit(engine, handle, tenant="a")
    assert len(engine.scheduler.waiting) == 4
    for handle in range(7, 13):
        submit(engine, handle, tenant="b")
    assert len(engine.scheduler.waiting) == 6, "another tenant has its share, and no more"
    for handle in range(1, 13):
        engine.scheduler.abort(handle, 0.0)
    engine.scheduler.check_integrity()
    assert not engine.scheduler.has_work


@pytest.mark.parametrize("ends", ["abort", "deadline"])
def test_a_resource_that_no_request_awaits_any_more_is_forgotten(ends: str) -> None:
    clock = Clock()
    engine = an_engine(clock)
    submit(engine, 1, timeout_s=5.0)
    if ends == "abort":
        engine.scheduler.abort(1, 0.0)
    clock.now_s = 6.0
    engine.step()
    engine.scheduler.check_integrity()
    assert engine.scheduler.failed(GRAMMAR, clock.now_s) == []


class OneRound:
    """A front that sends nothing, and is gone after one round of the engine's loop; and the engine's watchdog."""

    def __init__(self) -> None:
        self.rounds = 0
        self.watchdog: list[str] = []

    def receive(self, *_: object) -> list[object] | None:
        self.rounds += 1
        return [] if self.rounds == 1 else None

    def goes_on(self, now_s: float) -> None:
        self.watchdog.append("goes on")

    def rests(self) -> None:
        self.watchdog.append("rests")


@pytest.mark.parametrize("timeout_s", [None, 300.0])
def test_the_watchdog_does_not_take_awaiting_a_resource_for_a_step_that_hangs(timeout_s: float | None) -> None:
    engine, front = an_engine(time.perf_counter), OneRound()
    submit(engine, 1, timeout_s=timeout_s)
    run(engine, front, front)  # type: ignore[arg-type]
    assert front.watchdog == ["goes on", "rests"]
