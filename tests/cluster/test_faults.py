"""Accidents happen to a fleet of real processes under load, and its clients notice nothing but a pause.

Every stream is compared, to the bit, with what it was without the accident; see bench/trunkline_bench/faults.
"""

import pytest

from tests.cluster.harmed_fleet import FEWEST, INTER_TOKEN_TIMEOUT, LONG, MANY, STREAMS, TOKENS, HarmedFleet
from tests.worker.engine_rig import DEMO_MODEL
from trunkline_bench.faults.fleet import running_fleet
from trunkline_bench.faults.main import poison_environment, worker_flags
from trunkline_bench.faults.poison.sitecustomize import POISON
from trunkline_bench.faults.scenarios import ACCIDENTS, poisoned, router_killed, struck, undisturbed
from trunkline_bench.faults.streams import Order, orders

pytestmark = pytest.mark.asyncio(loop_scope="package")

SICK = Order([*POISON, 5, 6, 7], {"max_tokens": 20, "seed": 1})


async def test_no_token_is_lost_repeated_or_changed_when_a_front_is_killed(fleet: HarmedFleet) -> None:
    wanted, expected = fleet.longest(FEWEST)
    outcome = await struck(fleet.routed, wanted, expected, ACCIDENTS["kill -9 of a front"])
    assert outcome.is_clean, (outcome.errors, outcome.differing, outcome.seams)
    assert outcome.resumed > 0, "no stream was hit"


@pytest.mark.slow
async def test_no_token_is_lost_repeated_or_changed_by_any_accident() -> None:
    wanted = orders(STREAMS, tokens=LONG)
    flags = worker_flags(deterministic=True, drain_timeout_s=0.2)
    async with running_fleet(DEMO_MODEL, *flags, router_arguments=(INTER_TOKEN_TIMEOUT,)) as fleet:
        expected = await undisturbed(fleet, wanted)
        assert not [record.error or record.seams for record in expected if record.error or record.seams]
        for name, accident in ACCIDENTS.items():
            outcome = await struck(fleet, wanted, expected, accident)
            assert outcome.is_clean, (name, outcome.errors, outcome.differing, outcome.seams)
            assert outcome.resumed > 0, f"{name}: no stream was hit"


async def test_a_request_that_kills_engines_costs_two_workers_at_most_and_nobody_else_anything(
    fleet: HarmedFleet,
) -> None:
    wanted, expected = fleet.longest(FEWEST)
    outcome, sick, lost = await poisoned(fleet.routed, wanted, expected, SICK)
    assert (sick.error, sick.asked_again) == ("Quarantined", "Quarantined")
    assert lost <= 2
    assert outcome.is_clean, (outcome.errors, outcome.differing, outcome.seams)
    assert outcome.records[-1].finish, "one that came after the conviction was served"


@pytest.mark.parametrize(
    ("flags", "environment", "streams"),
    [
        pytest.param((), poison_environment(deadly_step=3), MANY, marks=pytest.mark.slow, id="late"),
        # Longer than a step of these streams takes on a busy machine.
        pytest.param(
            ("--step-timeout-s=4",),
            poison_environment() | {"TRUNKLINE_DEADLY_HANG": "1"},
            FEWEST,
            marks=pytest.mark.slow,
            id="hang",
        ),
    ],
)
async def test_a_request_that_kills_engines_late_or_hangs_them_is_found_out_likewise(
    fleet: HarmedFleet, flags: tuple[str, ...], environment: dict[str, str], streams: int
) -> None:
    wanted, expected = fleet.longest(streams)  # whichever fleet it is, the bits are the same
    flags = (*worker_flags(deterministic=True), *flags)
    async with running_fleet(DEMO_MODEL, *flags, environment=environment) as harmed:
        outcome, sick, lost = await poisoned(harmed, wanted, expected, SICK)
    assert (sick.error, sick.asked_again) == ("Quarantined", "Quarantined")
    assert lost <= 2
    assert outcome.is_clean, (outcome.errors, outcome.differing, outcome.seams)


@pytest.mark.slow
async def test_a_router_that_is_killed_costs_its_own_streams_one_more_try() -> None:
    wanted = orders(STREAMS, tokens=TOKENS)
    async with running_fleet(DEMO_MODEL, *worker_flags(deterministic=True), routers=2) as fleet:
        expected = await undisturbed(fleet, wanted)
        outcome, loss = await router_killed(fleet, wanted, expected)
    assert loss.is_contained, loss
    assert outcome.is_clean, (outcome.errors, outcome.differing, outcome.seams)
