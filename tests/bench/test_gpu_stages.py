"""The stages of `make bench-gpu` run, tiny and interpreted; without a GPU the command says so in one line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.worker.engine_rig import DEMO_MODEL
from trunkline_bench.gpu.main import main
from trunkline_bench.simulation.fitted_cost import FittedCost


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "trunkline_bench.gpu.main", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_every_stage_runs(tmp_path: Path) -> None:
    done = bench("--tiny", str(DEMO_MODEL), "--output", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("20*.json")
    stages = json.loads(path.read_text())["stages"]
    assert list(stages) == [
        "ceilings", "attention correctness", "other kernels' correctness", "engine equality", "decode attention",
        "prefill attention", "engine", "closed loop", "transformers", "options",
        "weight-only options",
    ]  # fmt: skip
    rows = {row["what"]: row for stage in stages.values() for row in stage["rows"] if "what" in row}
    assert all(stage["rows"] for stage in stages.values())
    assert rows["2 x (9 in, 3 out)"]["finished"]
    assert rows["--deterministic"]["of_plain"] > 0
    assert rows["generate, sdpa"]["output_tok_per_s"] > 0
    assert any(what.startswith("generate_batch") and "output_tok_per_s" in row for what, row in rows.items())
    # What the engine's steps took is a profile that the simulator takes.
    FittedCost.from_json((tmp_path / "h200-8b-fitted.json").read_text())


def test_without_a_gpu_one_line_says_so(tmp_path: Path) -> None:
    done = bench("--output", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith("no GPU that torch can use: nothing is measured")
    assert done.stderr.count("\n") == 1


def test_an_unknown_stage_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["main", "--only", "speed"])
    with pytest.raises(SystemExit, match="no stage is called 'speed'"):
        main()


def test_no_more_is_needed_than_a_gpu_machine_has() -> None:
    absent = (
        "structlog",
        "opentelemetry",
        "redis",
        "matplotlib",
        "uvloop",
        "grpc",
        "grpc_status",
        "jinja2",
        "pydantic",
    )
    blocked = f"import sys; sys.modules.update(dict.fromkeys({absent}))"
    command = [sys.executable, "-c", f"{blocked}; import trunkline_bench.gpu.main"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
