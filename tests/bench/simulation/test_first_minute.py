"""The first large prompts of a worker that has hardly measured its device do not delay other tenants."""

from dataclasses import replace

import pytest

from trunkline_bench.simulation.costs.fitted_cost import FittedCost
from trunkline_bench.simulation.noisy_neighbours import WORKERS, allowed_s
from trunkline_bench.simulation.worker.neighbours import Neighbours, Tenant
from trunkline_bench.simulation.worker.simulated_worker import WorkerSpec

# Until then the worker has only seen the innocent tenant's requests of one token.
FLOODED_S = 3.0
RUN_S = 1.5
INNOCENT = Tenant("innocent", 1, 5, 1, pause_s=0.01)
FLOODS = {
    "prompts of 1,000 tokens": Tenant("flood", 128, 1000, 16, starts_s=FLOODED_S),
    "requests of 32 tokens that decode": Tenant("flood", 256, 32, 64, starts_s=FLOODED_S),
    "one prompt of 12,000 tokens": Tenant("flood", 1, 12_000, 16, starts_s=FLOODED_S),
}
# 400 µs per token, as for the demo model on a shared core.
SLOW = FittedCost((0.003, 400e-6, 0.0, 0.0, 0.0, 0.0, 0.0), (0.003, 400e-6, 0.0, 0.0, 0.0, 0.0, 5e-9))
DEVICES = {**WORKERS, "slow CPU": replace(WORKERS["CPU, small model"], cost=SLOW)}


@pytest.mark.parametrize("flood", FLOODS)
@pytest.mark.parametrize("device", ["CPU, small model", "slow CPU"])
def test_a_flood_that_is_the_first_real_work_of_a_worker_does_not_starve_another_tenant(
    device: str, flood: str
) -> None:
    spec = DEVICES[device]
    neighbours = Neighbours(spec, [INNOCENT, FLOODS[flood]])
    unloaded_s = max(neighbours.run(FLOODED_S).tenants["innocent"].ttft_s)
    observed = neighbours.run(FLOODED_S + RUN_S)
    times_s = observed.tenants["innocent"].latest_s(observed.duration_s)
    assert max(times_s) <= allowed_s(unloaded_s, spec.limits.itl_target_s)


@pytest.mark.parametrize("device", DEVICES)
def test_a_worker_without_measurements_fills_its_steps_after_a_few(device: str) -> None:
    spec = DEVICES[device]
    flood = Tenant("flood", 128, 1000, 16)

    def tokens_in(run_s: float, spec: WorkerSpec) -> int:
        return Neighbours(spec, [flood]).run(run_s).computed_tokens

    without_target = replace(spec, limits=replace(spec.limits, itl_target_s=0.0))
    assert tokens_in(2.0, spec) >= 0.75 * tokens_in(2.0, without_target)
