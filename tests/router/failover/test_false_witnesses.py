"""Workers that say of an innocent request that it has killed them. Two of them could have any prompt that they are sent
quarantined in the whole fleet: they are believed where they are gone, and a few times in an hour. Beyond that one
router alone refuses what kills its workers, for a short time."""

from array import array
from collections.abc import Collection
from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from tests.router.cluster import cluster, refusal, until
from tests.router.failover_rig import DIED, LONG, dies, fakes, first_of, kills_two, rest
from trunkline.status import QUARANTINED, RequestRefused
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline_router.request import dispatch
from trunkline_router.request.failover import (
    BRIEF_S,
    MOST_BRIEF,
    MOST_CONVICTIONS,
    MOST_WITNESSED,
    WITNESS_S,
    Computation,
    Quarantine,
    Witnesses,
)


async def test_workers_that_live_on_after_a_request_has_killed_them_convict_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch, "GONE_WITHIN_S", 0.05)
    workers = fakes("a", "b", "c")
    async with cluster(*workers) as router:
        workers[0].cache_prompt(LONG)
        await until(lambda: len(router.connected(0).blocks) > 0)
        with capture_logs() as lines:
            call = router.generate(LONG, request_id="victim")
            (await workers[0].arrived.get()).fail(DIED, suspect=True)
            second = await first_of(workers[1:])
            second.fail(DIED, suspect=True, sole_suspect=True)
            third = await first_of([worker for worker in workers[1:] if worker is not second.worker])
            third.tokens(3, finish=True)
            assert (await rest(call))[-1].usage.completion_tokens == 3
        (said,) = [line for line in lines if "still connected" in line["event"]]
        assert sorted(said["alive"]) == sorted([workers[0].address, second.worker.address])
        again = router.generate(LONG)
        (await first_of(workers)).tokens(1, finish=True)
        assert (await rest(again))[-1].usage.completion_tokens == 1, "it is not quarantined"


async def test_one_of_two_that_is_gone_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "GONE_WITHIN_S", 0.05)
    workers = fakes("a", "b", "c")
    async with cluster(*workers) as router:
        workers[0].cache_prompt(LONG)
        await until(lambda: len(router.connected(0).blocks) > 0)
        call = router.generate(LONG)
        (await workers[0].arrived.get()).fail(DIED, suspect=True)
        await dies(router, workers, workers[0])
        second = await first_of(workers[1:])
        second.fail(DIED, suspect=True, sole_suspect=True)
        third = await first_of([worker for worker in workers[1:] if worker is not second.worker])
        third.tokens(2, finish=True)
        assert (await rest(call))[-1].usage.completion_tokens == 2


async def test_beyond_what_is_believed_a_deadly_request_is_still_refused_here_and_no_other_router_is_told() -> None:
    workers = fakes("a", "b", "c", "d")
    async with cluster(*workers) as router:
        dispatcher = router.inference.dispatcher
        believes, addresses = dispatcher.quarantine.witnesses.believe, {worker.address for worker in workers}
        for _ in range(MOST_CONVICTIONS):
            assert believes("", addresses, dispatcher.clock_s())
        with capture_logs() as lines:
            call = router.generate(LONG)
            left = await kills_two(router, workers, call)
            assert (await refusal(call)).reason == QUARANTINED
        (said,) = [line for line in lines if line["event"] == "request quarantined"]
        assert not said["everywhere"]
        for seed in range(3):
            again = await refusal(router.generate(LONG, sampling=SamplingParams(seed=seed)))
            assert again.reason == QUARANTINED
        assert not any(worker.submits for worker in left), "no further worker sees it"
        convictions = dispatcher.quarantine._convictions
        assert not convictions.has_new
        assert not convictions.next_report(0.0, is_beat=True, everything=True)


async def test_one_tenants_deadly_requests_leave_the_others_their_protection() -> None:
    workers = fakes("a", "b", "c", "d")
    async with cluster(*workers) as router:
        dispatcher = router.inference.dispatcher
        believes, addresses = dispatcher.quarantine.witnesses.believe, {worker.address for worker in workers}
        for _ in range(MOST_CONVICTIONS):
            assert believes("flood", addresses, dispatcher.clock_s())
        call = router.generate(LONG)
        await kills_two(router, workers, call)
        assert (await refusal(call)).reason == QUARANTINED
        assert dispatcher.quarantine._convictions.has_new, "the whole fleet learns of it"


class Disbelieved(Witnesses):
    def believe(self, tenant: str, addresses: Collection[str], now_s: float) -> bool:
        return False


@given(
    turns=st.lists(
        st.tuples(st.integers(0, 5), st.floats(0, BRIEF_S / 2), st.booleans()),
        max_size=60,
    )
)
def test_a_brief_conviction_lasts_for_so_long_after_the_last_death_and_no_longer(
    turns: list[tuple[int, float, bool]],
) -> None:
    quarantine, now_s, ends = Quarantine(), 0.0, dict[int, float]()
    quarantine.witnesses = Disbelieved()
    for number, passes_s, kills in turns:
        now_s += passes_s
        request = Computation("tenant", "tiny", array("i", [number]))
        if kills:
            assert not quarantine.convict(request, {"liar"}, now_s)
            ends[number] = now_s + BRIEF_S
        is_held = now_s < ends.get(number, 0.0)
        with pytest.raises(RequestRefused) if is_held else nullcontext():
            quarantine.check(request, now_s)
        assert len(quarantine._brief) == sum(end > now_s for end in ends.values()), "what has ended is forgotten"


def test_what_is_remembered_of_brief_convictions_is_bounded() -> None:
    quarantine = Quarantine()
    quarantine.witnesses = Disbelieved()
    for number in range(MOST_BRIEF + 10):
        quarantine.convict(Computation("tenant", "tiny", array("i", [number])), {"liar"}, 1.0)
    assert len(quarantine._brief) == MOST_BRIEF
    with pytest.raises(RequestRefused):
        quarantine.check(Computation("tenant", "tiny", array("i", [MOST_BRIEF + 9])), 1.0)
    quarantine.check(Computation("tenant", "tiny", array("i", [0])), 1.0)


@given(
    cases=st.lists(
        st.tuples(
            st.sampled_from(["x", "y"]),
            st.sets(st.sampled_from("abcd"), min_size=1, max_size=2),
            st.floats(0, WITNESS_S / 3),
        ),
        max_size=80,
    )
)
def test_no_worker_convicts_more_than_so_many_requests_of_a_tenant_in_any_hour(
    cases: list[tuple[str, set[str], float]],
) -> None:
    witnesses, now_s, convicted = Witnesses(), 0.0, list[tuple[float, str, set[str]]]()
    for tenant, addresses, passes_s in cases:
        now_s += passes_s
        within = [those for when, whose, those in convicted if whose == tenant and when > now_s - WITNESS_S]
        counts = {address: sum(address in those for those in within) for address in addresses}
        is_believed = witnesses.believe(tenant, addresses, now_s)
        assert is_believed == (max(counts.values()) < MOST_CONVICTIONS)
        if is_believed:
            convicted.append((now_s, tenant, addresses))


def test_what_is_remembered_of_witnesses_is_bounded_and_keeps_those_that_convicted_last() -> None:
    witnesses = Witnesses()
    for _ in range(MOST_CONVICTIONS):
        assert witnesses.believe("x", {"liar:1"}, 0.0)
    for number in range(MOST_WITNESSED - MOST_CONVICTIONS):
        assert witnesses.believe("x", {f"w:{number}"}, 1.0)
    assert not witnesses.believe("x", {"liar:1"}, 2.0)
    assert len(witnesses._convictions) <= MOST_WITNESSED
    assert witnesses.believe("x", {"liar:1"}, WITNESS_S + 1.0), "an hour later"
