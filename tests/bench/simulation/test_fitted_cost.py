"""A fitted cost can be written and read back, and an invalid file is an error that names the problem."""

import json
from pathlib import Path
from typing import Any

import pytest

from trunkline_bench.reports.statistics import percentile
from trunkline_bench.simulation import calibration, main
from trunkline_bench.simulation.costs.fitted_cost import FEATURES, FittedCost, FittedCostError, fit
from trunkline_bench.simulation.costs.step_work import StepWork
from trunkline_bench.simulation.traces.workload import read_trace
from trunkline_bench.simulation.worker.replay import replay
from trunkline_bench.simulation.worker.simulated_worker import WorkerSpec
from trunkline_worker.scheduler.limits import Batching

COST = FittedCost((0.002, 1 / 3e5, 1e-6, 1e-6, 1e-8, 0.0, 0.0), (0.003, 2e-5, 1e-6, 0.0, 1e-8, 1e-8, 1e-10), 65_536)
GOOD = json.loads(COST.to_json())
NO_TIME = dict.fromkeys(FEATURES, 0.0)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    rows = "".join(f"2023-11-16 18:15:{second:02}.0,{50 + second},{5 + second}\n" for second in range(30))
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    return path


@pytest.mark.parametrize("cost", [COST, FittedCost(COST.decode, COST.mixed)], ids=["with a pool", "without"])
def test_a_written_cost_is_read_back_exactly(cost: FittedCost) -> None:
    assert FittedCost.from_json(cost.to_json()) == cost


def test_a_fit_can_be_written_and_read() -> None:
    cost = fit([(StepWork(rows, 0, rows, rows, 100 * rows, 0, 0.0), 0.002 + 1e-5 * rows) for rows in range(1, 50)])
    assert FittedCost.from_json(cost.to_json()) == cost


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"decode": GOOD["decode"] | {"rows": "fast"}}, "decode.rows is 'fast'; it must be a number of seconds from 0"),
        ({"decode": GOOD["decode"] | {"rows": -1e-5}}, "decode.rows is -1e-05"),
        ({"decode": GOOD["decode"] | {"rows": True}}, "decode.rows is True"),
        ({"mixed": GOOD["mixed"] | {"steps": float("inf")}}, "mixed.steps is inf"),
        ({"mixed": GOOD["mixed"] | {"steps": float("nan")}}, "mixed.steps is nan"),
        ({"mixed": GOOD["mixed"] | {"steps": 10**400}}, "mixed.steps is 1000"),
        ({"mixed": GOOD["mixed"] | {"speed": 1.0}}, "'mixed.speed' is unknown"),
        ({"mixed": {"steps": 1.0}}, "mixed.rows is missing"),
        ({"mixed": [1.0]}, "mixed is not an object with steps, rows"),
        ({"mixed": NO_TIME}, "mixed: a step of 2 tokens would take no time"),
        ({"decode": NO_TIME | {"chunk_pairs": 1.0}}, "decode: a step of 1 tokens would take no time"),
        ({"kv_tokens": 0}, "kv_tokens is 0; it must be a whole number from 1"),
        ({"kv_tokens": 1.5}, "kv_tokens is 1.5"),
        ({"extra\n": 1}, "'extra\\n' is unknown"),
    ],
)
def test_a_bad_field_is_named(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(FittedCostError, match=r"^[^\n]*$") as caught:
        FittedCost.from_json(json.dumps(GOOD | change))
    assert str(caught.value).startswith(problem)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "not JSON: Expecting value"),
        ("[" * 100_000, "nested too deeply"),
        ("7", "the file is not an object with decode, mixed"),
        (json.dumps({"decode": GOOD["decode"]}), "mixed is missing"),
    ],
)
def test_text_that_is_not_a_fitted_cost_is_an_error_of_one_line(text: str, problem: str) -> None:
    with pytest.raises(FittedCostError, match=r"^[^\n]*$") as caught:
        FittedCost.from_json(text)
    assert problem in str(caught.value)


def test_the_calibration_that_is_written_is_what_simulate_replays(
    tmp_path: Path, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calibration.write(tmp_path / "results", "# The result\n", COST)
    assert (tmp_path / "results" / "calibration.md").read_text() == "# The result\n"
    profile = tmp_path / "results" / "calibration.json"
    arguments = ["--trace", str(trace), "--profile", str(profile), "--block-size", "16"]
    worker = main.worker(main.make_parser().parse_args(arguments), Batching.CONTINUOUS)
    assert (worker.cost, worker.num_blocks) == (COST, 65_536 // 16)
    assert main.main(arguments) == 0
    run = replay(read_trace(trace), WorkerSpec(COST, 65_536 // 16, 16, worker.limits))
    p50_s = percentile([outcome.ttft_s for outcome in run.outcomes if outcome.ttft_s is not None], 0.5)
    assert f"| {p50_s:.3g} /" in capsys.readouterr().out


def test_a_cost_with_the_hosts_time_takes_as_long_as_an_engine_that_does_not_run_ahead(trace: Path) -> None:
    limits = main.worker(main.make_parser().parse_args(["--trace", str(trace)]), Batching.CONTINUOUS).limits
    apart = replay(read_trace(trace), WorkerSpec(COST, 4096, 16, limits, run_ahead=0, host_s=0.001))
    together = replay(read_trace(trace), WorkerSpec(COST.with_host_s(0.001), 4096, 16, limits, run_ahead=0))
    assert [o.done_s for o in together.outcomes] == pytest.approx([o.done_s for o in apart.outcomes])


def test_a_profile_that_cannot_be_used_is_one_line_that_names_the_flag(
    tmp_path: Path, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "no-pool.json").write_text(FittedCost(COST.decode, COST.mixed).to_json())
    (tmp_path / "bad.json").write_text(json.dumps(GOOD | {"mixed": NO_TIME}))
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe")
    problems = {
        "b200-8b": "allowed: h200-8b",
        str(tmp_path / "nowhere.json"): "there is no file",
        str(tmp_path): "Is a directory",
        str(tmp_path / "bad.json"): "mixed: a step of 2 tokens would take no time",
        str(tmp_path / "binary.json"): "can't decode",
        str(tmp_path / "no-pool.json"): "--kv-blocks is needed",
    }
    for profile, problem in problems.items():
        assert main.main(["--trace", str(trace), "--profile", profile]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert problem in error
        assert profile in error
        assert "--" in error
    arguments = ["--trace", str(trace), "--profile", str(tmp_path / "no-pool.json"), "--kv-blocks", "100"]
    assert main.main(arguments) == 0
