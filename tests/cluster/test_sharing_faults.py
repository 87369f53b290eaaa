"""One of two routers is killed, and the Redis that they share is lost: real processes, and every stream compared.

See test_faults.py, whose streams these are.
"""

import pytest
from redis import Redis

from tests.cluster.harmed_fleet import FEWEST, HarmedFleet, SharingPair
from trunkline_bench.faults.fleet import until
from trunkline_bench.faults.scenarios import redis_lost, router_killed

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="package")]


async def test_only_streams_of_the_router_that_is_killed_see_unavailable_and_asked_again_they_succeed(
    fleet: HarmedFleet, pair: SharingPair
) -> None:
    wanted, expected = fleet.longest(FEWEST)
    outcome, loss = await router_killed(pair.routed, wanted, expected)
    assert loss.is_contained, loss
    assert (loss.own, loss.others) == (FEWEST // 2, FEWEST // 2)
    assert outcome.is_clean, (outcome.errors, outcome.differing, outcome.seams)


@pytest.mark.parametrize("way", ["killed, back empty", "hung, continued later"])
async def test_no_request_notices_that_redis_is_lost_and_routers_use_it_again(
    fleet: HarmedFleet, pair: SharingPair, way: str
) -> None:
    wanted, expected = fleet.longest(FEWEST)
    redis = pair.redis
    lose, find = (redis.kill, redis.start) if way.startswith("killed") else (redis.hang, redis.go_on)
    lost, back = pair.printed("shared state lost"), pair.printed("shared state back")
    outcome = await redis_lost(pair.routed, wanted, expected, lose, find)
    assert outcome.is_clean, (outcome.errors, outcome.differing, outcome.seams)
    assert len(outcome.records) == 3 * FEWEST, "as it went, without it, and with it again"
    await until(lambda: both_more(pair.printed("shared state back"), back), "both routers have it back")
    assert both_more(pair.printed("shared state lost"), lost)
    with Redis.from_url(redis.url) as client:
        await until(lambda: bool(client.keys("*:leases")), "leases of workers are there again")


def both_more(now: list[int], before: list[int]) -> bool:
    return all(a > b for a, b in zip(now, before, strict=True))
