"""One attack of each kind on real processes, a second each: no request of another tenant fails, and memory is bounded.

`make bench-attacks` runs all of them, and bounds the other tenant's times and the lag of the router's loop too.
"""

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio

from tests.worker.engine_rig import DEMO_MODEL
from trunkline_bench.attacks.attack_result import MAX_KEPT_MIB, MAX_P99_MS, MAX_RSS_MIB
from trunkline_bench.attacks.attacked_cluster import AttackedCluster, attacked_cluster
from trunkline_bench.attacks.catalogue import Section, cases
from trunkline_bench.attacks.host_faults import HOST_FAULTS
from trunkline_bench.attacks.vectors.attacker import ALL_OF_1_TO_5
from trunkline_bench.attacks.window import fixed

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

SECONDS = 1.0
PREPARED_S = 4.0  # of an attacker whose messages come to 400 MiB, and that makes them first
LONGER = (1, 4, 16)  # times as long: attackers have a low priority, and get to nothing for a while on a busy machine
STARVED_S = 3.0  # of a noisy tenant: longer than its neighbour may wait on the busiest machine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def victims() -> AsyncIterator[AttackedCluster]:
    """Two workers, for every attack that leaves them as they are."""
    async with attacked_cluster(Section.LIAR, DEMO_MODEL) as running:
        yield running


async def nobody_notices(victims: AttackedCluster, attack: str, seconds: float = SECONDS) -> str:
    """The attack meets a new router; returns what became of it. The innocent's requests are answered, and memory stays
    within its bounds."""
    case = next(case for case in cases() if case.section is victims.section and case.attack == attack)
    result = await victims.run(case, fixed(seconds), alone_ms=MAX_P99_MS)
    assert result.record.times_ms
    assert not result.record.errors
    assert not result.strange_statuses, result.outcomes
    assert result.rss_peak < MAX_RSS_MIB, result.markdown()
    assert result.rss_after - result.rss_before < MAX_KEPT_MIB, result.markdown()
    return result.outcomes


async def has_effect(victims: AttackedCluster, attack: str, what: str = "", seconds: float = SECONDS) -> None:
    """As nobody_notices(). Fails unless the attacker has done something, and the outcome has this text."""
    outcomes = ""
    for times in LONGER:
        outcomes = await nobody_notices(victims, attack, times * seconds)
        if outcomes and what in outcomes:
            return
    raise AssertionError(f"the attacker did nothing, or not {what!r}: {outcomes}")


def one_worker(victims: AttackedCluster, section: Section) -> AttackedCluster:
    return replace(victims, section=section, workers=victims.workers[:1])


async def test_a_client_neither_stops_a_router_nor_fills_its_memory(victims: AttackedCluster) -> None:
    await has_effect(one_worker(victims, Section.CLIENT), ALL_OF_1_TO_5, seconds=PREPARED_S)


@pytest.mark.parametrize("attack", ["3 million empty stop strings", "rapid reset"])
async def test_neither_of_these_attacks_stops_a_router_or_fills_its_memory(
    victims: AttackedCluster, attack: str
) -> None:
    """They have done harm once, and their messages are soon made; the test above has all attacks at the same time."""
    await has_effect(one_worker(victims, Section.CLIENT), attack)


@pytest.mark.parametrize("attack", ["cancelled requests over HTTP", "bodies of 6 MiB over HTTP"])
async def test_a_client_over_http_disturbs_no_client_over_grpc(victims: AttackedCluster, attack: str) -> None:
    await has_effect(one_worker(victims, Section.HTTP), attack)


@pytest.mark.parametrize("attack", ["64 requests of 16 choices of 900 tokens", "600 chats of 1 MiB at once"])
async def test_a_noisy_tenant_does_not_starve_another_one(victims: AttackedCluster, attack: str) -> None:
    await nobody_notices(one_worker(victims, Section.TENANT), attack, STARVED_S)


async def test_a_worker_with_another_tokenizer_is_set_aside_and_costs_its_pool_nothing(
    victims: AttackedCluster,
) -> None:
    await has_effect(victims, "another tokenizer under the same weights", "set aside")


async def test_false_entries_in_redis_cost_no_request_anything(victims: AttackedCluster) -> None:
    await nobody_notices(one_worker(victims, Section.REDIS), "3,000 false leases")


@pytest.mark.parametrize("fault", HOST_FAULTS)
async def test_a_fault_of_a_routers_host_costs_no_request_anything(victims: AttackedCluster, fault: str) -> None:
    assert await nobody_notices(one_worker(victims, Section.HOST), fault, STARVED_S)


async def test_what_a_client_sends_to_a_workers_own_port_does_not_stop_the_worker() -> None:
    async with attacked_cluster(Section.PORT, DEMO_MODEL) as victims:
        await nobody_notices(victims, "sessions with 8 MiB of empty submits")


async def test_grammars_that_are_heavy_to_compile_disturb_no_other_tenant() -> None:
    async with attacked_cluster(Section.GUIDED, DEMO_MODEL) as victims:
        await nobody_notices(victims, "300 heavy schemas at once", STARVED_S)
