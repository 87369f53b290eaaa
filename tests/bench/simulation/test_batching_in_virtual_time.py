"""Every kind of batching runs in virtual time as it would step by step, and its plots stay small."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.parameters import one_in
from trunkline_bench.reports.statistics import percentile
from trunkline_bench.simulation.costs.device_profile import PROFILES
from trunkline_bench.simulation.traces.workload import mixed_lengths, poisson
from trunkline_bench.simulation.worker.replay import replay
from trunkline_bench.simulation.worker.simulated_worker import WorkerSpec
from trunkline_bench.simulation.worker.step_series import StepSeries
from trunkline_worker.scheduler.limits import Batching, SchedulerLimits

PROFILE = PROFILES["h200-8b"]
LIMITS = SchedulerLimits(max_step_tokens=1024, max_running_requests=24, itl_target_s=0.05, batch_size=8)
LONG_RUN_STEPS = 50_000
MOST_PICTURE_BYTES = 150_000  # they are committed with the results


@pytest.mark.parametrize("run_ahead", [pytest.param(0, marks=pytest.mark.slow), 1])
@pytest.mark.parametrize("batching", one_in(4, Batching))
def test_fast_forwarding_equals_stepping_whatever_the_batching(batching: Batching, run_ahead: int) -> None:
    requests = poisson(24, 10.0, mixed_lengths)
    limits = replace(LIMITS, batching=batching)
    worker = WorkerSpec(PROFILE, 4000, 16, limits, context_length=16_000, run_ahead=run_ahead, host_s=0.0005)
    fast, slow = (replay(requests, replace(worker, fast_forward=forward)) for forward in (True, False))
    assert fast.outcomes == slow.outcomes
    assert fast.admitted == slow.admitted
    assert fast.stats.steps == slow.stats.steps
    assert fast.duration_s == slow.duration_s


def walk(draw: np.random.Generator, most: int) -> list[int]:
    """A random walk between 1 and `most`, like the length of a queue."""
    steps = np.cumsum(draw.normal(0.0, most / 200, LONG_RUN_STEPS)) % (2 * most)
    return (1 + np.where(steps < most, steps, 2 * most - steps)).astype(int).tolist()  # type: ignore[no-any-return]


def test_pictures_of_a_long_run_stay_small(tmp_path: Path) -> None:
    from trunkline_bench.simulation import plots  # matplotlib, which takes a second

    draw = np.random.default_rng(0)
    series = StepSeries(
        time_s=[step * 0.02 for step in range(LONG_RUN_STEPS)],
        running=walk(draw, 256),
        kv_live=walk(draw, 4000),
        kv_cached=walk(draw, 3000),
        kv_free=walk(draw, 2000),
        waiting=list(zip(walk(draw, 10), walk(draw, 100), walk(draw, 500), strict=True)),
        prefill=walk(draw, 1024),
        decode=walk(draw, 256),
        padding=walk(draw, 64),
    )
    plots.kv_and_queue(series, tmp_path / "kv.png")
    plots.batch_composition(series, tmp_path / "batch.png")
    plots.ttft_cdf({name: draw.lognormal(0.0, 1.0, 20_000).tolist() for name in "abc"}, tmp_path / "cdf.png")
    for path in tmp_path.iterdir():
        assert 1000 < path.stat().st_size < MOST_PICTURE_BYTES, path.name


@pytest.mark.parametrize(("share", "rank"), [(0.01, 1), (0.5, 50), (0.501, 51), (0.99, 99), (1.0, 100)])
def test_a_percentile_is_a_value_that_was_measured(share: float, rank: int) -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert percentile(values, share) == rank
