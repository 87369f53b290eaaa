"""Accidents happen to a fleet of real processes under load, and its clients notice nothing but a pause.

Every stream is compared, to the bit, with what it was without the accident; see bench/trunkline_bench/faults.
"""

import pytest

from tests.worker.engine_rig import DEMO_MODEL
from trunkline_bench.faults.fleet import running_fleet
from trunkline_bench.faults.main import POISON, poison_environment, worker_flags
from trunkline_bench.faults.scenarios import ACCIDENTS, poisoned, router_killed, struck, undisturbed
from trunkline_bench.faults.streams import Order, orders

STREAMS = 50
TOKENS = (40, 90)
HANG = ("--inter-token-timeout-s=1.5",)
QUICK = ("kill -9 of an engine", "engine stopped (SIGSTOP), continued later", "link reset")


async def assert_nobody_notices(accidents: list[str], tokens: tuple[int, int] = TOKENS) -> None:
    wanted = orders(STREAMS, tokens=tokens)
    flags = worker_flags(deterministic=True)
    async with running_fleet(DEMO_MODEL, *flags, router_arguments=HANG) as fleet:
        expected = await undisturbed(fleet, wanted)
        assert not [record.error or record.seams for record in expected if record.error or record.seams]
        for name in accidents:
            outcome = await struck(fleet, wanted, expected, ACCIDENTS[name])
            assert outcome.errors == [], name
            assert outcome.differing == [], name
            assert outcome.seams == [], name
            assert outcome.resumed > 0, f"{name}: it hit nobody"


async def test_no_token_is_lost_repeated_or_changed_by_accidents() -> None:
    await assert_nobody_notices(list(QUICK))


@pytest.mark.slow
async def test_no_token_is_lost_repeated_or_changed_by_any_accident() -> None:
    await assert_nobody_notices(list(ACCIDENTS), (100, 250))


@pytest.mark.parametrize("deadly_step", [1, pytest.param(3, marks=pytest.mark.slow)])
async def test_a_request_that_kills_engines_costs_two_workers_at_most_and_nobody_else_anything(
    deadly_step: int,
) -> None:
    wanted = orders(STREAMS, tokens=TOKENS)
    poison = Order([*POISON, 5, 6, 7], {"max_tokens": 20, "seed": 1})
    flags = worker_flags(deterministic=True)
    async with running_fleet(DEMO_MODEL, *flags, environment=poison_environment(deadly_step)) as fleet:
        expected = await undisturbed(fleet, wanted)
        outcome, sick, lost = await poisoned(fleet, wanted, expected, poison)
    assert (sick.error, sick.asked_again) == ("Quarantined", "Quarantined")
    assert lost <= 2
    assert outcome.is_clean, (outcome.errors, outcome.differing, outcome.seams)


async def test_a_request_that_hangs_engines_is_found_out_likewise() -> None:
    wanted = orders(STREAMS // 2, tokens=TOKENS)
    poison = Order([*POISON, 5, 6, 7], {"max_tokens": 20, "seed": 1})
    flags = (*worker_flags(deterministic=True), "--step-timeout-s=1")
    environment = poison_environment() | {"TRUNKLINE_DEADLY_HANG": "1"}
    async with running_fleet(DEMO_MODEL, *flags, environment=environment) as fleet:
        expected = await undisturbed(fleet, wanted)
        outcome, sick, lost = await poisoned(fleet, wanted, expected, poison)
    assert (sick.error, sick.asked_again) == ("Quarantined", "Quarantined")
    assert lost <= 2
    assert outcome.is_clean, (outcome.errors, outcome.differing, outcome.seams)


@pytest.mark.slow
async def test_a_router_that_is_killed_costs_its_own_streams_one_more_try() -> None:
    wanted = orders(STREAMS, tokens=TOKENS)
    async with running_fleet(DEMO_MODEL, *worker_flags(deterministic=True), routers=2) as fleet:
        expected = await undisturbed(fleet, wanted)
        outcome, asked_again = await router_killed(fleet, wanted, expected)
    assert asked_again
    assert all(number % 2 == 0 for number in asked_again), "every second stream entered through it"
    assert outcome.is_clean, (outcome.errors, outcome.differing, outcome.seams)
