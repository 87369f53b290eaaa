"""The engine in virtual time: fast-forwarding changes nothing, and the cost models are right."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from trunkline_bench.reports.statistics import jain
from trunkline_bench.simulation import main, report
from trunkline_bench.simulation.costs.device_profile import BANDWIDTH_SHARE, PROFILES, STEP_OVERHEAD_S, Profile
from trunkline_bench.simulation.costs.fitted_cost import FittedCost, fit
from trunkline_bench.simulation.costs.step_work import StepWork
from trunkline_bench.simulation.traces.trace_request import TraceRequest
from trunkline_bench.simulation.traces.workload import at_once, mixed_lengths, poisson
from trunkline_bench.simulation.worker.replay import Replayed, replay
from trunkline_bench.simulation.worker.simulated_executor import StepCost
from trunkline_bench.simulation.worker.simulated_worker import SimulatedWorker, WorkerSpec, submit_of
from trunkline_worker.engine.messages import Prompt
from trunkline_worker.scheduler.limits import AdmissionRule, Batching, SchedulerLimits
from trunkline_worker.scheduler.step_cost import StepLoad

PROFILE = PROFILES["h200-8b"]
LIMITS = SchedulerLimits(max_step_tokens=1024, max_running_requests=24, itl_target_s=0.05, interactive_reserve=0.1)
FITTED = FittedCost((0.002, 1e-5, 1e-6, 1e-6, 1e-8, 0.0, 0.0), (0.003, 2e-5, 1e-6, 0.0, 1e-8, 1e-8, 1e-10))


def workload(rate: float, seed: int = 0) -> list[TraceRequest]:
    """A workload with all lanes, two tenants and some common prefixes."""
    made = []
    for index, request in enumerate(poisson(60, rate, mixed_lengths, seed=seed)):
        lane = ("interactive", "standard", "batch")[index % 3]
        made.append(replace(request, lane=lane, tenant="ab"[index % 2]))
    return made


def everything(run: Replayed) -> object:
    return (
        [(o.first_token_s, o.done_s, o.output_tokens, o.cached_tokens, o.refused) for o in run.outcomes],
        run.admitted,
        run.stats.steps,
        [(lane.itl_s, lane.ttft_s, lane.tpot_s, lane.e2e_s) for lane in run.stats.lanes],
        run.duration_s,
    )


@pytest.mark.parametrize("run_ahead", [pytest.param(0, marks=pytest.mark.slow), 1])
@pytest.mark.parametrize("rate", [pytest.param(2.0, marks=pytest.mark.slow), 40.0])
@pytest.mark.parametrize(
    ("rule", "cost"),
    [
        pytest.param(rule, cost, id=f"{rule}-{name}", marks=() if row % 2 == column else pytest.mark.slow)
        for row, rule in enumerate(AdmissionRule)
        for column, (name, cost) in enumerate((("profile", PROFILE), ("fitted", FITTED)))
    ],
)
def test_fast_forwarding_equals_stepping_to_the_last_bit(
    run_ahead: int, rate: float, cost: Profile | FittedCost, rule: AdmissionRule
) -> None:
    limits = replace(LIMITS, admission=rule, aging_s=2.0)
    worker = WorkerSpec(cost, 1500, 16, limits, context_length=16_000, run_ahead=run_ahead, host_s=0.0005)
    fast, slow = (replay(workload(rate), replace(worker, fast_forward=forward)) for forward in (True, False))
    assert everything(fast) == everything(slow)
    assert all(outcome.output_tokens == outcome.request.output_tokens for outcome in slow.outcomes)
    assert len(fast.series.time_s) < len(slow.series.time_s)


def test_fast_forwarding_stops_where_an_aged_sequence_has_what_it_was_promised() -> None:
    limits = SchedulerLimits(max_step_tokens=64, max_running_requests=1, aging_s=0.5, aged_tokens=16)
    worker = WorkerSpec(PROFILE, 100, 16, limits, context_length=1600)
    lanes = ("batch", "interactive", "interactive", "standard")
    requests = [
        TraceRequest(0.0, 20 + n, 100, lambda n=n: [n] * (20 + n), lane=lanes[n % 4])  # type: ignore[misc]
        for n in range(24)
    ]
    fast, slow = (replay(requests, replace(worker, fast_forward=forward)) for forward in (True, False))
    assert slow.stats.steps.preemptions > 0, "others take its place then"
    assert everything(fast) == everything(slow)
    assert len(fast.series.time_s) < len(slow.series.time_s)


def test_a_run_of_steps_costs_what_its_steps_cost() -> None:
    work = StepWork(64, 0, 64, 64, 70_001, 0, 0.0)
    costs: list[StepCost] = [*PROFILES.values(), FITTED]
    for cost in costs:
        one_by_one = [cost.step_time_s(work._replace(decode_kv_tokens=70_001 + j * 64)) for j in range(50)]
        assert cost.run_times_s(work, 50).tolist() == one_by_one


def test_profiles_lie_on_their_rooflines() -> None:
    decode = StepWork(1, 0, 1, 1, 1000, 0, 0.0)
    bound_s = (PROFILE.model.weight_bytes - 2 * PROFILE.model.work.head_params) / PROFILE.device.bandwidth_bytes_s
    assert 1.1 < PROFILE.step_time_s(decode) / bound_s < 1.4
    prefill = StepWork(8192, 0, 1, 1, 0, 8192, 8192 * 4096.0)
    bound_s = 2 * PROFILE.model.work.layer_params * 8192 / PROFILE.device.flops
    assert 1.4 < PROFILE.step_time_s(prefill) / bound_s < 1.8
    for profile in PROFILES.values():
        assert profile.kv_blocks(16) > 0
        assert profile.step_time_s(decode) > 0
    assert PROFILES["l4-8b"].step_time_s(decode) > 3 * PROFILE.step_time_s(decode)


def test_steps_of_a_model_with_experts_read_those_that_their_rows_use() -> None:
    profile = PROFILES["h200-30b-a3b"]
    work = profile.model.work
    times = [profile.step_time_s(StepWork(rows, 0, 0, rows, 0, 0, 0.0)) for rows in (1, 16, 64)]
    least_s, more_s, most_s = (seconds - STEP_OVERHEAD_S for seconds in times)
    whole = work.expert_bytes + work.layer_bytes
    assert more_s / least_s == pytest.approx(work.read_bytes(16) / work.read_bytes(1))
    assert 0.95 < most_s * BANDWIDTH_SHARE * profile.device.bandwidth_bytes_s / whole < 1
    assert most_s > 6 * least_s


def test_a_simulated_worker_learns_what_experts_cost() -> None:
    profile = PROFILES["h200-30b-a3b"]
    limits = SchedulerLimits(max_step_tokens=2048, max_running_requests=128, itl_target_s=0.03)
    spec = WorkerSpec(profile, 20_000, 16, limits, fast_forward=False, routing=profile.model.spec.routing)
    worker = SimulatedWorker(spec, lambda now_s, step: None)
    requests = poisson(40, 3.0, mixed_lengths, seed=1) + poisson(10, 30.0, mixed_lengths, seed=2)
    for handle, request in enumerate(sorted(requests, key=lambda request: request.arrival_s)):
        prompt = Prompt(request.prompt())
        worker.submit(request.arrival_s, submit_of(handle, request, 1.0), lambda p=prompt: p, request.output_tokens)  # type: ignore[misc]
    worker.advance(1000.0)
    assert not worker.has_work
    cost = worker.engine.scheduler.cost
    for rows in (1, 4, 16, 64, 128):
        load, true_s = StepLoad(rows, 0, 0.0, rows), profile.step_time_s(StepWork(rows, 0, rows, rows, 0, 0, 0.0))
        assert cost.time_s(load) == pytest.approx(true_s, rel=0.1), f"{rows} rows"


def test_tokens_are_reported_before_the_cost_model_is_fitted() -> None:
    told = []
    worker = SimulatedWorker(
        WorkerSpec(PROFILE, 4000, 16, LIMITS, fast_forward=False),
        lambda now_s, step: told.append((cost.num_fits, cost.is_fit_due)),
    )
    cost = worker.engine.scheduler.cost
    request = at_once(workload(1.0)[:1])[0]
    prompt = Prompt(request.prompt())
    worker.submit(0.0, submit_of(1, replace(request, output_tokens=2000), 1.0), lambda: prompt, 2000)
    worker.advance(1000.0)
    assert cost.num_fits > 3
    assert sum(is_due for _, is_due in told) == cost.num_fits - 1, "each fit but the first one was due in one report"


def test_a_fit_finds_the_cost_that_made_the_samples() -> None:
    draw = np.random.default_rng(0)
    samples = []
    for _ in range(400):
        rows, chunk = int(draw.integers(1, 300)), int(draw.integers(0, 2)) * int(draw.integers(2, 900))
        work = StepWork(rows + chunk, 0, rows, rows, int(draw.integers(1, 90_000)), chunk, chunk * chunk / 2)
        samples.append((work, FITTED.step_time_s(work) * float(draw.uniform(0.97, 1.03))))
    found = fit(samples)
    for work, time_s in samples:
        assert found.step_time_s(work) == pytest.approx(time_s, rel=0.08)


@pytest.mark.slow
def test_static_batching_pays_for_its_padding_and_continuous_batching_does_not() -> None:
    requests = at_once(workload(10.0)[:24])
    runs = {
        kind: replay(requests, WorkerSpec(PROFILE, 4000, 16, replace(LIMITS, batching=kind, batch_size=8)))
        for kind in Batching
    }
    padding = {kind: run.stats.steps.padding_tokens for kind, run in runs.items()}
    assert [kind for kind, tokens in padding.items() if tokens] == [Batching.STATIC]
    rates = {kind: report.output_rate(run) for kind, run in runs.items()}
    assert rates[Batching.CONTINUOUS] > rates[Batching.STATIC_UNPADDED] > rates[Batching.STATIC]


def test_pictures_are_drawn(tmp_path: Path) -> None:
    from trunkline_bench.simulation import plots  # matplotlib, which takes a second

    run = replay(workload(20.0), WorkerSpec(PROFILE, 4000, 16, LIMITS))
    main.draw({"continuous": run}, tmp_path)
    plots.bars({"a": 1.0, "b": 2.0}, "things", tmp_path / "bars.png")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"ttft-cdf.png", "kv-and-queue-continuous.png", "batch-composition-continuous.png", "bars.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())


def test_the_command_prints_a_table_and_names_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        + "\n".join(f"2023-11-16 18:15:{second:02}.0,{50 + second},{5 + second}" for second in range(30))
    )
    assert main.main(["--trace", str(trace), "--batching", "continuous,static", "--output", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "| continuous |" in out
    assert "| static |" in out
    assert (tmp_path / "out" / "ttft-cdf.png").exists()
    assert main.main(["--trace", str(tmp_path / "nowhere")]) == 2
    assert main.main(["--trace", str(trace), "--batching", "clever"]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("trunkline bench simulate:")]
    assert len(errors) == 2
    assert "allowed: continuous, static" in errors[1]


def test_jains_index() -> None:
    assert jain([3.0, 3.0]) == 1.0
    assert jain([1.0, 0.0, 0.0, 0.0]) == 0.25


def test_more_devices_than_kv_heads_keep_copies_of_the_keys_and_values() -> None:
    profile = PROFILES["l4-70b"]
    assert profile.num_devices == 2 * profile.model.spec.num_kv_heads
    capacity = profile.num_devices * (profile.device.memory_bytes * 0.9 - 2e9) - profile.model.weight_bytes
    assert profile.kv_blocks(16) == int(capacity / (2 * profile.model.work.kv_token_bytes * 16))
