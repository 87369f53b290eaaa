"""What every store promises: the same tests for the one in process and for a real Redis."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import pytest

from tests.router.conftest import REDIS_VERSIONS
from tests.router.embedded_store import EmbeddedStore
from tests.router.shared_state_rig import Clock, Output, Router, use
from trunkline.status import RequestRefused
from trunkline_bench.servers.redis_server import RedisServer
from trunkline_router.quotas.quota import Quotas
from trunkline_router.quotas.redis_store import RedisStore
from trunkline_router.quotas.store import Lease, WorkerKey
from trunkline_router.quotas.sync import rest_s
from trunkline_router.request.failover import Computation, Quarantine
from trunkline_router.routing.credit import Credit

REQUESTS = Quotas(requests_per_minute=10)
TOKENS = Quotas(tokens_per_minute=1000)
IN_FLIGHT = Quotas(tokens_in_flight=100)
WORKER = WorkerKey("w", 1 << 63)
LEASE = Lease("10.0.0.1:50061", "w", 1 << 63, "tiny")


@pytest.fixture
def clock() -> Clock:
    return Clock()


MakeRouter = Callable[[str], "AsyncIterator[Router]"]


@pytest.fixture(params=["embedded", *REDIS_VERSIONS])
async def routers(
    request: pytest.FixtureRequest, redis_servers: dict[str, RedisServer], clock: Clock
) -> AsyncIterator[tuple[Router, Router]]:
    """Two routers that share a store."""
    async with AsyncExitStack() as stack:
        stores: list[RedisStore]
        if request.param == "embedded":
            stores = [EmbeddedStore(clock.now_ms)] * 2
        else:
            prefix = request.node.name
            url = redis_servers[request.param].url
            stores = [RedisStore(url, prefix, clock_ms=clock.now_ms) for _ in range(2)]
        made = []
        for name, store in zip("ab", stores, strict=True):
            router = Router(store, name, clock)
            stack.push_async_callback(store.close)
            await router.start()
            assert router.is_reachable
            made.append(router)
        await made[0].beat()
        yield made[0], made[1]


async def refusal(router: Router, quotas: Quotas, prompt: int = 10, output: int | None = 10) -> RequestRefused:
    with pytest.raises(RequestRefused) as caught:
        await router.admit(quotas, prompt, output)
    assert caught.value.reason == "QUOTA_EXCEEDED"
    return caught.value


async def test_requests_per_minute_are_counted_over_both_routers(routers: tuple[Router, Router], clock: Clock) -> None:
    for turn in range(10):
        await routers[turn % 2].admit(REQUESTS)
        clock.pass_s(1)
    for router in routers:
        refused = await refusal(router, REQUESTS)
        assert refused.quota == "t/requests_per_minute"
        assert 50_000 < refused.retry_delay_ms < 50_510, "when the first one is a minute old"


async def test_a_time_to_come_back_is_one_at_which_there_is_room(routers: tuple[Router, Router], clock: Clock) -> None:
    for _ in range(10):
        await routers[0].admit(REQUESTS)
        clock.pass_s(0.7)
    refused = await refusal(routers[1], REQUESTS)
    clock.pass_s(refused.retry_delay_ms / 1e3)
    await routers[1].admit(REQUESTS)
    await refusal(routers[0], REQUESTS)


async def test_no_minute_holds_more_than_the_quota(routers: tuple[Router, Router], clock: Clock) -> None:
    admitted: list[float] = []
    for turn in range(1500):
        try:
            use(await routers[turn % 2].admit(REQUESTS), 10, 10)
            admitted.append(clock.ms)
        except RequestRefused:
            pass
        clock.pass_s(0.2)
        if turn % 25 == 0:
            for router in routers:
                await router.beat()
    assert not any(router.admission.reserves_alone for router in routers)
    most = max(sum(at <= other < at + 60_000 for other in admitted) for at in admitted)
    assert most == 10
    assert len(admitted) >= 0.98 * 10 * 300 / 60


async def test_tokens_are_reserved_up_front_and_what_was_not_used_comes_back(routers: tuple[Router, Router]) -> None:
    a, b = routers
    first = await a.admit(TOKENS, 100, 800)
    assert (await refusal(b, TOKENS, 100, 100)).quota == "t/tokens_per_minute"
    use(first, 100, 50)
    await a.beat()
    await b.admit(TOKENS, 100, 750)
    await refusal(a, TOKENS, 1, 0)


async def test_what_was_used_beyond_an_estimate_is_charged(routers: tuple[Router, Router]) -> None:
    a, b = routers
    first = await a.admit(TOKENS, 100, None)
    assert first.tokens == 100 + 256
    use(first, 100, 890)
    await a.beat()
    assert (await refusal(b, TOKENS, 10, 1)).quota == "t/tokens_per_minute"
    await b.admit(TOKENS, 10, 0)


async def test_what_outgrows_its_estimate_counts_while_it_runs_and_what_was_counted_ahead_comes_back(
    routers: tuple[Router, Router],
) -> None:
    a, b = routers
    first = await a.admit(TOKENS, 100, None)
    answer = Output(first)
    answer.comes_to(256)
    await a.beat()
    await b.admit(TOKENS, 10, 634)
    answer.comes_to(257)
    await a.beat()
    await b.beat()
    assert b.window_of("t") == (1, 10 + 634), "which is its own part"
    assert a.window_of("t") == (1, 100 + 2 * 257)
    assert (await refusal(b, TOKENS, 1, 0)).quota == "t/tokens_per_minute"
    assert (await refusal(a, Quotas(tokens_in_flight=1258), 1, 0)).quota == "t/tokens_in_flight"
    use(first, 100, 300)
    await a.beat()
    assert a.window_of("t") == (1, 100 + 300)
    await b.admit(Quotas(tokens_per_minute=1145), 100, 0)
    await refusal(b, Quotas(tokens_per_minute=1144), 1, 0)


async def test_running_requests_count_for_more_at_the_first_beat_after_they_outgrow_their_estimates(
    routers: tuple[Router, Router],
) -> None:
    router, _ = routers
    quotas = Quotas(tokens_per_minute=1_000_000)
    reservations = [await router.admit(quotas, 1, None, most_tokens=1_000_000) for _ in range(10)]
    answers = [Output(reservation) for reservation in reservations]
    estimate = reservations[0].tokens - 1
    counted = router.window_of("t")
    for answer in answers:
        answer.comes_to(estimate)
    for _ in range(5):
        await router.beat()
    assert router.window_of("t") == counted
    answers[3].comes_to(estimate + 1)
    use(reservations[7], 1, estimate + 1)
    for _ in range(5):
        await router.beat()
    assert router.window_of("t") == (10, counted[1] + (estimate + 2) + 1), "twice what it has, and what the other used"
    answers[3].comes_to(2 * estimate + 3)
    await router.beat()
    assert router.window_of("t") == (10, counted[1] + 2 * (2 * estimate + 3) - estimate + 1), "and once more"
    answers[7].comes_to(9 * estimate)
    for reservation, answer in zip(reservations, answers, strict=True):
        if answer is not answers[7]:
            use(reservation, 1, 1)
    answers[5].comes_to(9 * estimate)
    await router.beat()
    assert router._own.book.tenant("t").in_flight == 0, "what has ended outgrows nothing"


async def test_short_answers_do_not_open_the_quotas_to_many_long_ones(routers: tuple[Router, Router]) -> None:
    """Capped answers teach nothing; ones that are short by themselves teach little, and what follows is seen."""
    quotas = Quotas(tokens_per_minute=10_000, tokens_in_flight=10_000)
    for capped in (1, None):
        for turn in range(25):
            use(await routers[turn % 2].admit(quotas, 1, capped, most_tokens=32_000), 1, 1)
            await routers[turn % 2].beat()
    answers: list[Output] = []
    while True:
        router = routers[len(answers) % 2]
        try:
            reservation = await router.admit(quotas, 1, None, most_tokens=32_000)
        except RequestRefused:
            break
        answers.append(Output(reservation))
    assert 14 <= len(answers) <= 16
    for computed in (1000, 10_000, 32_000):
        for answer in answers:
            answer.comes_to(computed)
        for router in routers:
            await router.beat()
        for router in routers:
            assert (await refusal(router, quotas, 1, None)).quota == "t/tokens_per_minute"


async def test_a_tenants_estimate_outlives_its_quiet_minutes(routers: tuple[Router, Router], clock: Clock) -> None:
    router, _ = routers
    quotas = Quotas(tokens_per_minute=100_000)
    use(await router.admit(quotas, 1, None, most_tokens=32_000), 1, 30_000)
    before = await router.admit(quotas, 1, None, most_tokens=32_000)
    use(before, 1, 0)
    for _ in range(5):
        clock.pass_s(61)
        await router.beat()
    assert (await router.admit(quotas, 1, None, most_tokens=32_000)).tokens == before.tokens > 20_000


@pytest.mark.parametrize("ahead_ms", [0, 130, 270, 490])
async def test_what_comes_back_leaves_the_window_with_what_it_was_taken_from(
    redis_of_all: RedisServer, clock: Clock, ahead_ms: int
) -> None:
    """However the router's clock and the store's stand to each other."""
    store = RedisStore(redis_of_all.url, f"skew-{ahead_ms}", clock_ms=lambda: clock.ms + ahead_ms)
    router = Router(store, "a", clock)
    await router.start()
    try:
        clock.pass_s(0.1)
        first = await router.admit(TOKENS, 900, 0)
        clock.pass_s(0.3)
        use(first, 10, 0)
        await router.beat()
        clock.pass_s(1.7)
        use(await router.admit(TOKENS, 950, 0), 950, 0)
        clock.pass_s(57)
        for _ in range(29):
            await refusal(router, TOKENS, 51, 0)
            clock.pass_s(0.1)
            await router.beat()
    finally:
        await store.close()


async def test_a_request_that_nobody_served_counts_for_nothing(routers: tuple[Router, Router]) -> None:
    a, b = routers
    for _ in range(10):
        use(await a.admit(REQUESTS), 0, 0)
    await a.beat()
    for _ in range(10):
        await b.admit(REQUESTS)
    await refusal(a, REQUESTS)


async def test_tokens_in_flight_are_counted_over_both_routers(routers: tuple[Router, Router]) -> None:
    a, b = routers
    first, second = await a.admit(IN_FLIGHT, 30, 20), await b.admit(IN_FLIGHT, 30, 20)
    refused = await refusal(a, IN_FLIGHT, 1, 0)
    assert (refused.quota, refused.retry_delay_ms) == ("t/tokens_in_flight", 1000)
    use(first, 30, 20)
    await a.beat()
    use(await b.admit(IN_FLIGHT, 30, 20), 30, 20)
    use(second, 30, 20)
    await b.beat()
    await a.admit(IN_FLIGHT, 30, 70)


async def test_a_request_that_is_being_refused_takes_nobodys_place(routers: tuple[Router, Router]) -> None:
    """All are asked for before any answer is there. What fits is admitted, whatever else was asked for meanwhile."""
    a, b = routers
    held = await b.admit(IN_FLIGHT, 50, 0)
    rounds: tuple[tuple[list[int], list[int]], ...] = (
        ([60, 30, 60, 15, 40, 5], [30, 15, 5]),
        ([60, 60, 60], []),
        ([30, 30, 20], [30, 20]),
    )
    for wanted, fits in rounds:
        asked = (a.admit(IN_FLIGHT, tokens, 0) for tokens in wanted)
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        admitted = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
        assert [one.tokens for one in admitted] == fits
        for one in admitted:
            use(one, one.tokens, 0)
        await a.beat()
    use(held, 50, 0)
    await b.beat()
    await a.admit(IN_FLIGHT, 100, 0)


async def test_what_a_dead_router_had_in_flight_comes_back(routers: tuple[Router, Router], clock: Clock) -> None:
    a, b = routers
    await a.admit(IN_FLIGHT, 30, 70)
    await refusal(b, IN_FLIGHT, 1, 0)
    clock.pass_s(2.9)
    await b.beat()
    await refusal(b, IN_FLIGHT, 1, 0)
    clock.pass_s(0.2)
    await b.admit(IN_FLIGHT, 30, 70)


async def test_a_request_over_its_quota_alone_is_refused_without_a_time_to_come_back(
    routers: tuple[Router, Router],
) -> None:
    refused = await refusal(routers[0], TOKENS, 100, 901)
    assert refused.retry_delay_ms == 0
    assert "may use 1001 tokens" in refused.message
    assert (await refusal(routers[0], TOKENS, 1001, None)).retry_delay_ms == 0
    assert (await routers[0].admit(TOKENS, 900, None)).tokens == 1000, "an estimate is no reason to refuse"


async def test_quotas_are_each_tenants_own(routers: tuple[Router, Router]) -> None:
    for _ in range(10):
        await routers[0].admit(REQUESTS)
    await refusal(routers[1], REQUESTS)
    await routers[1].admit(REQUESTS, tenant="another")


async def test_a_tenant_without_quotas_asks_nobody(routers: tuple[Router, Router]) -> None:
    reservation = await routers[0].admit(Quotas())
    assert (reservation.tokens, routers[0].admission.reserves) == (0, 0)
    use(reservation, 10, 10)


async def test_credits_reach_the_other_router_and_go_with_their_router(
    routers: tuple[Router, Router], clock: Clock
) -> None:
    a, b = routers
    a.fleet.own = {WORKER: Credit(3, 700)}
    await a.beat()
    await b.beat()
    assert b.fleet.others == {WORKER: Credit(3, 700)}
    assert a.fleet.others == {}, "its own are not told to it"
    a.fleet.own = {}
    await a.beat()
    await b.beat()
    assert b.fleet.others == {}
    a.fleet.own = {WORKER: Credit(1, 0)}
    await a.beat()
    clock.pass_s(3.1)
    await b.beat()
    assert b.fleet.others == {}, "a died"


def test_routers_tell_one_another_every_few_milliseconds_as_long_as_that_takes_a_tenth_of_their_time() -> None:
    assert [rest_s(took_s) for took_s in (0.0, 0.0004, 0.001, 0.0015, 0.3)] == pytest.approx(
        [0.005, 0.005, 0.010, 0.015, 0.020]
    )


async def test_a_router_that_was_taken_for_dead_says_again_what_it_has_open(
    routers: tuple[Router, Router], clock: Clock
) -> None:
    a, b = routers
    a.fleet.own = {WORKER: Credit(3, 700)}
    await a.beat()
    clock.pass_s(3.1)
    await b.beat()
    await a.sync.tick()
    await b.beat()
    assert b.fleet.others == {WORKER: Credit(3, 700)}


async def test_credits_are_looked_at_once_a_tick_and_by_a_router_that_is_alone_once_a_second(
    routers: tuple[Router, Router], clock: Clock
) -> None:
    a, b = routers
    asked = a.fleet.times_asked
    for choices in range(10):
        a.fleet.own = {WORKER: Credit(choices, 0)}
        await a.sync.tick()
    assert a.fleet.times_asked == asked + 10
    clock.pass_s(3.1)
    await a.beat()
    asked, syncs = a.fleet.times_asked, a.syncs
    for choices in range(100):
        a.fleet.own = {WORKER: Credit(choices, 0)}
        await a.sync.tick()
        clock.pass_s(0.02)
    assert (a.fleet.times_asked, a.syncs) == (asked + 1, syncs + 1), "no other router would hear them"
    await b.beat()
    await a.beat()
    await b.beat()
    assert b.fleet.others == {WORKER: Credit(99, 0)}
    a.fleet.own = {}
    await a.sync.tick()
    await b.beat()
    assert b.fleet.others == {}


async def test_a_lease_is_known_to_all_until_nobody_renews_it(routers: tuple[Router, Router], clock: Clock) -> None:
    a, b = routers
    a.fleet.own_leases = [LEASE]
    await a.beat()
    await b.beat()
    assert list(b.fleet.known) == [LEASE]
    restarted = Lease(LEASE.address, "w", 7, "tiny")
    a.fleet.own_leases = [restarted]
    await a.beat()
    await b.beat()
    assert list(b.fleet.known) == [restarted]
    a.fleet.own_leases = []
    clock.pass_s(3.1)
    await b.beat()
    await b.beat()
    assert list(b.fleet.known) == []


async def test_a_conviction_is_known_to_all_until_it_ends(routers: tuple[Router, Router], clock: Clock) -> None:
    a, b = routers
    a.convict(b"\x00poison\xff", ttl_ms=10_000)
    assert a.is_convicted(b"\x00poison\xff")
    assert not b.is_convicted(b"\x00poison\xff")
    await a.beat()
    await b.beat()
    assert b.is_convicted(b"\x00poison\xff")
    assert not b.is_convicted(b"innocent")
    clock.pass_s(10.1)
    assert not a.is_convicted(b"\x00poison\xff")
    assert not b.is_convicted(b"\x00poison\xff")


async def test_a_router_that_learns_of_a_conviction_late_refuses_for_the_rest_of_its_hour_and_no_longer(
    routers: tuple[Router, Router], clock: Clock
) -> None:
    a, b = routers
    here, there = Quarantine(b"key", a.convictions), Quarantine(b"key", b.convictions)
    poison = Computation("t", "m", array("i", [1, 2, 3]))
    here.convict(poison, {"w"}, now_s=clock.steady_s())
    await a.beat()
    there.check(poison, now_s=clock.steady_s())
    clock.pass_s(59 * 60)
    await b.beat()
    for quarantine in (here, there):
        with pytest.raises(RequestRefused):
            quarantine.check(poison, now_s=clock.steady_s())
    clock.pass_s(60)
    for quarantine in (here, there):
        quarantine.check(poison, now_s=clock.steady_s())


async def test_convictions_are_bounded(routers: tuple[Router, Router]) -> None:
    a, b = routers
    for number in range(4200):
        a.convict(number.to_bytes(4, "big"), ttl_ms=10_000 + number)
    await a.beat()
    await b.beat()
    known = [number for number in range(4200) if b.is_convicted(number.to_bytes(4, "big"))]
    assert known == list(range(4200 - 4096, 4200))


async def test_service_is_counted_over_the_fleet_and_corrects_weights(
    routers: tuple[Router, Router], clock: Clock
) -> None:
    a, b = routers
    mine = await a.admit(Quotas(), tenant="mine")
    theirs = await b.admit(Quotas(), tenant="theirs", weight=1.25)
    a._own.served.add("mine", 6000.0)
    b._own.served.add("theirs", 6000.0 / 1.25)
    for router in (a, b, a, b):
        await router.beat()
    assert a.weight_factor("mine") == pytest.approx((5400 / 6000) ** 6)
    assert b.weight_factor("theirs") == pytest.approx((5400 / 4800) ** 6)
    clock.pass_s(60)
    await b.beat()
    await a.beat()
    mine.__exit__(None, None, None)
    await a.beat()
    await b.beat()
    assert b.weight_factor("theirs") == 1.0, "no tenant competes with it any more"
    theirs.__exit__(None, None, None)
