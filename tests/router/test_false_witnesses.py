"""Workers that say of an innocent request that it has killed them. Two of them could have any prompt that they are sent
quarantined in the whole fleet: they are believed where they are gone, and a few times in an hour."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from tests.router.cluster import cluster, until
from tests.router.failover_rig import DIED, LONG, fakes, first_of, rest
from trunkline_router import dispatch
from trunkline_router.suspicion import MOST_CONVICTIONS, MOST_WITNESSES, WITNESS_S, Witnesses


async def test_workers_that_live_on_after_a_request_has_killed_them_convict_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch, "GONE_WITHIN_S", 0.05)
    workers = fakes("a", "b", "c")
    async with cluster(*workers) as router:
        workers[0].cache_prompt(LONG)
        await until(lambda: len(router.live(0).blocks) > 0)
        with capture_logs() as lines:
            call = router.generate(LONG, request_id="victim")
            (await workers[0].arrived.get()).fail(DIED, suspect=True)
            second = await first_of(workers[1:])
            second.fail(DIED, suspect=True, sole_suspect=True)
            third = await first_of([worker for worker in workers[1:] if worker is not second.worker])
            third.tokens(3, finish=True)
            assert (await rest(call))[-1].usage.completion_tokens == 3
        (said,) = [line for line in lines if "not believed" in line["event"]]
        assert sorted(said["alive"]) == sorted([workers[0].address, second.worker.address])
        again = router.generate(LONG)
        (await first_of(workers)).tokens(1, finish=True)
        assert (await rest(again))[-1].usage.completion_tokens == 1, "it is not quarantined"


async def test_one_of_two_that_is_gone_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "GONE_WITHIN_S", 0.05)
    workers = fakes("a", "b", "c")
    async with cluster(*workers) as router:
        workers[0].cache_prompt(LONG)
        await until(lambda: len(router.live(0).blocks) > 0)
        call = router.generate(LONG)
        (await workers[0].arrived.get()).fail(DIED, suspect=True)
        live = router.live(0)
        await until(lambda: not live.session.num_open)
        await workers[0].die()
        second = await first_of(workers[1:])
        second.fail(DIED, suspect=True, sole_suspect=True)
        third = await first_of([worker for worker in workers[1:] if worker is not second.worker])
        third.tokens(2, finish=True)
        assert (await rest(call))[-1].usage.completion_tokens == 2


@given(
    cases=st.lists(
        st.tuples(st.sets(st.sampled_from("abcd"), min_size=1, max_size=2), st.floats(0, WITNESS_S / 3)), max_size=80
    )
)
def test_no_worker_convicts_more_than_so_many_requests_in_any_hour(cases: list[tuple[set[str], float]]) -> None:
    witnesses, now_s, convicted = Witnesses(), 0.0, list[tuple[float, set[str]]]()
    for addresses, passes_s in cases:
        now_s += passes_s
        within = [when for when in convicted if when[0] > now_s - WITNESS_S]
        counts = {address: sum(address in those for _, those in within) for address in addresses}
        is_believed = witnesses.believe(addresses, now_s)
        assert is_believed == (max(counts.values()) < MOST_CONVICTIONS)
        if is_believed:
            convicted.append((now_s, addresses))


def test_what_is_remembered_of_witnesses_is_bounded_and_keeps_those_that_convicted_last() -> None:
    witnesses = Witnesses()
    for _ in range(MOST_CONVICTIONS):
        assert witnesses.believe({"liar:1"}, 0.0)
    for number in range(MOST_WITNESSES - 1):
        assert witnesses.believe({f"w:{number}"}, 1.0)
    assert not witnesses.believe({"liar:1"}, 2.0)
    assert len(witnesses._convicted_s) <= MOST_WITNESSES
    assert witnesses.believe({"liar:1"}, WITNESS_S + 1.0), "an hour later"
