"""The stages of `make bench-gpu` run, tiny and interpreted; without a GPU the command says so in one line."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.worker.engine_rig import DEMO_MODEL


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "trunkline_bench.gpu.main", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_every_stage_runs(tmp_path: Path) -> None:
    done = bench("--tiny", str(DEMO_MODEL), "--output", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.iterdir()
    stages = json.loads(path.read_text())["stages"]
    assert list(stages) == ["ceilings", "correctness", "decode attention", "prefill attention", "engine"]
    assert all(stage["rows"] for stage in stages.values())
    assert stages["engine"]["rows"][0]["finished"]


def test_without_a_gpu_one_line_says_so(tmp_path: Path) -> None:
    done = bench("--output", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith("no GPU that torch can use: nothing is measured")
    assert done.stderr.count("\n") == 1


def test_an_unknown_stage_is_named() -> None:
    assert "no stage is called 'speed'" in bench("--only", "speed").stderr
