"""What a worker did lately, from its reports."""

from collections.abc import Callable
from math import inf, nan

import pytest

from tests.router.cluster import cluster
from tests.router.fake_worker import FakeWorker
from tests.router.watch.watch_rig import stats
from trunkline.v1.worker_pb2 import Distribution, GetStatsResponse, LaneStats, StepTotals
from trunkline_router.observe.watch.worker_tile import HIT_RATE_S, MOST_REPORTS, WorkerRates, worker_tile


def test_rates_are_between_two_reports_by_the_workers_own_clock() -> None:
    rates = WorkerRates()
    rates.take(stats(100.0, steps=10, decode=1000, prefill=5000), 1.0)
    assert (rates.batch(), rates.output_tokens_per_s(), rates.preemptions_per_s()) == (None, None, None)
    rates.take(stats(102.0, steps=30, decode=1500, prefill=9000), 9.0)
    batch = rates.batch()
    assert batch is not None
    assert (batch.steps_per_s, batch.decode_tokens_per_s, batch.prefill_tokens_per_s) == (10.0, 250.0, 2000.0)
    assert (rates.output_tokens_per_s(), rates.preemptions_per_s(), rates.reported_s) == (250.0, 0.0, 9.0)


@pytest.mark.parametrize(("told", "shown"), [(2.5, 2.5), (0.0, None), (nan, None), (inf, None)])
async def test_only_workers_with_experts_show_an_imbalance(told: float, shown: float | None) -> None:
    report = stats(1.0)
    report.expert_imbalance = told
    rates = WorkerRates()
    rates.take(report, 1.0)
    async with cluster(FakeWorker("a")) as router:
        tile = worker_tile(router.links[0], rates, None, 1.0, int)
    assert (tile.expert_imbalance if tile.HasField("expert_imbalance") else None) == shown


def test_a_report_of_the_same_moment_changes_nothing() -> None:
    rates = WorkerRates()
    for uptime_s in (1.0, 2.0, 2.0):
        rates.take(stats(uptime_s, decode=int(100 * uptime_s)), uptime_s)
    assert rates.output_tokens_per_s() == 100.0


def test_the_hit_rate_is_that_of_the_last_minute() -> None:
    rates = WorkerRates()
    assert rates.hit_rate is None
    rates.take(stats(0.0, prefill=0, hits=0), 0.0)
    for second in range(1, 200):
        misses = min(second, 100)  # from then on all is found
        rates.take(stats(float(second), prefill=100 * misses, hits=100 * (second - misses)), float(second))
    assert rates.hit_rate == 1.0
    assert sum(rates.hit_tokens()) == pytest.approx(100 * HIT_RATE_S, rel=0.02)


def test_a_worker_that_starts_again_under_the_same_connection_begins_anew() -> None:
    rates = WorkerRates()
    rates.take(stats(100.0, decode=1000, hits=50), 0.0)
    rates.take(stats(1.0, decode=10, hits=1), 1.0)
    assert (rates.batch(), rates.output_tokens_per_s()) == (None, None)
    assert rates.hit_rate is None


@pytest.mark.parametrize("clock", [lambda n: nan, lambda n: inf, lambda n: 5.0 + n * 1e-6, lambda n: -n])
def test_no_clock_of_a_worker_makes_its_reports_pile_up(clock: Callable[[int], float]) -> None:
    rates = WorkerRates()
    for number in range(3 * MOST_REPORTS):
        rates.take(stats(clock(number), prefill=number, hits=number), float(number))
    assert len(rates._hits) <= MOST_REPORTS


@pytest.mark.parametrize("uptime_s", [nan, inf, -inf, -1.0, 5.0, 5.0 + 1e-9])
@pytest.mark.parametrize("number", [0, 2**64 - 1])
def test_no_number_of_a_worker_is_too_wild(uptime_s: float, number: int) -> None:
    rates = WorkerRates()
    rates.take(stats(5.0), 0.0)
    wild = GetStatsResponse(
        uptime_s=uptime_s,
        steps=StepTotals(prefill_tokens=number, decode_tokens=number, prefix_hit_tokens=number, device_time_s=inf),
        lanes=[LaneStats(lane=7, output_tokens=number, ttft_s=Distribution(p50=inf, p99=nan))] * 9,  # type: ignore[arg-type]
    )
    for _ in range(3):
        rates.take(wild, 1.0)
        rates.batch()
        for value in (rates.output_tokens_per_s(), rates.preemptions_per_s(), rates.hit_rate, rates.ttft_p50_s()):
            assert value is None or 0 <= value < inf
        assert len(rates.lanes()) <= 3
