"""Metrics of quotas and of a real Redis that is lost."""

import asyncio
from collections.abc import Iterable
from itertools import chain

from prometheus_client.core import Metric

from tests.router.cluster import until
from tests.router.metrics.records import value, values
from tests.router.running_routers import running
from trunkline_bench.servers.redis_server import RedisServer
from trunkline_router.observe.metrics.router_gauges import quota_families, redis_families
from trunkline_router.quotas.quota import Quotas
from trunkline_runtime.telemetry.series import BoundedNames

QUOTAS = Quotas(requests_per_minute=2, tokens_in_flight=1000)


async def test_quotas_and_a_redis_that_is_lost_are_told(redis: RedisServer) -> None:
    async with running(redis.url, "a", "b") as (a, b):

        def families() -> Iterable[Metric]:
            return chain(quota_families(a, BoundedNames(10)), redis_families(a))

        assert [await router.admits(QUOTAS) for router in (a, b, a)] == [True, True, False]
        await until(lambda: len(a.neighbours) == 1)
        assert values(families, "trunkline_router_quota_limit", "tenant", "quota") == {
            ("t", "requests_per_minute"): 2,
            ("t", "tokens_in_flight"): 1000,
        }
        used = values(families, "trunkline_router_quota_used", "quota")
        assert round(used["requests_per_minute",]) == 2, "of both routers"
        assert values(families, "trunkline_router_quota_refusals_total", "quota") == {("requests_per_minute",): 1}
        assert values(families, "trunkline_router_quota_decisions_total", "by") == {("store",): 2, ("alone",): 0}
        calls = values(families, "trunkline_router_redis_call_seconds_count", "script")
        assert calls["reserve",] == 2
        assert calls["sync",] >= 1
        assert value(families, "trunkline_router_redis_reachable") == 1
        assert value(families, "trunkline_router_redis_losses_total") == 0
        assert value(families, "trunkline_router_neighbours") == 1
        await asyncio.to_thread(redis.kill)
        await until(lambda: not a.is_reachable)
        assert value(families, "trunkline_router_redis_reachable") == 0
        assert value(families, "trunkline_router_redis_losses_total") == 1


async def test_tenants_beyond_the_bound_are_not_mixed_into_one_quota(redis: RedisServer) -> None:
    async with running(redis.url, "a") as (router,):
        await router.admits(QUOTAS)
        assert not values(lambda: quota_families(router, BoundedNames(0)), "trunkline_router_quota_used")
