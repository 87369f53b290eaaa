"""`trunkline bench simulate-fleet`: a table and its files, or an error of one line that names the invalid argument."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.bench.simulation.commands import status_of
from trunkline_bench.simulation.fleet import main
from trunkline_bench.simulation.fleet.sweep import Point, highest_load


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    entries = [
        {"timestamp": 500 * number, "input_length": 600, "output_length": 4, "hash_ids": [0, number // 3]}
        for number in range(30)
    ]
    path.write_text("\n".join(map(json.dumps, entries)))
    return path


command = partial(status_of, main.main)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("", "one of --copies and --load is needed"),
        ("--copies 1 --load 1", "one of --copies and --load is needed"),
        ("--copies 0", "--copies: 0 is out of range"),
        ("--copies nan", "--copies: nan is out of range"),
        ("--copies 1 --workers 0", "--workers: 0 is out of range"),
        ("--copies 1 --policy fastest", "--policy 'fastest': allowed: predicted-ttft, "),
        ("--copies 1 --routers 1000", "--routers: 1000 is out of range"),
        ("--copies 1 --profile abacus", "--profile: invalid choice: 'abacus'"),
        ("--copies 1 --block-size 1 --workers 64", "--block-size 1: 64 pools of h200-8b have "),
        ("--copies 0.01 --duration-s 1", "no request that fits"),
        ("--copies 1 --output /dev/null/x", "--output /dev/null/x: "),
    ],
)
def test_an_invalid_argument_is_an_error_of_one_line(
    trace: Path, capsys: pytest.CaptureFixture[str], arguments: str, problem: str
) -> None:
    assert command("--trace", trace, *arguments.split()) == 2
    told = capsys.readouterr()
    assert problem in told.err
    assert told.err.startswith("trunkline bench simulate-fleet: ")
    assert told.err.count("\n") == 1
    assert not told.out


@pytest.mark.parametrize("place", ["trace.jsonl", "trace.jsonl/below", "/proc/nothing"])
def test_an_output_folder_that_cannot_be_created_is_an_error_before_the_runs(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    monkeypatch.delattr(main, "simulate")
    folder = trace.parent / place
    assert command("--trace", trace, "--copies", 1, "--output", folder) == 2
    assert capsys.readouterr().err.startswith(f"trunkline bench simulate-fleet: --output {folder}: ")


def test_a_missing_trace_is_an_error_of_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--trace", "/nowhere", "--copies", 1) == 2
    assert capsys.readouterr().err == "trunkline bench simulate-fleet: /nowhere: No such file or directory\n"


def test_policies_stand_side_by_side_in_a_table_in_json_and_in_plots(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    policies = ["predicted-ttft", "round-robin", "sglang-cache-aware"]
    assert command("--trace", trace, "--workers", 3, "--copies", 2, "--duration-s", 10, "--ramp-s", 2,
                   "--policy", ",".join(policies), "--routers", 2, "--output", output) == 0  # fmt: skip
    table = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0].strip("| ") for line in table[2:5]] == policies
    written = json.loads((output / "fleet.json").read_text())
    assert [run["policy"] for run in written] == policies
    assert all(run["ttft_s"][0] <= run["ttft_s"][2] and run["refused"] == 0 for run in written)
    assert (output / "over-time.png").stat().st_size > 10_000


def test_the_trunkline_command_runs_it(trace: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "trunkline_cli.main", "bench", "simulate-fleet", "--trace", str(trace), "--copies", "0"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 2
    assert run.stderr.startswith("trunkline bench simulate-fleet: ")


def test_the_search_ends_just_below_the_highest_load() -> None:
    tried = []

    def run(point: Point) -> dict[str, object]:
        assert point.is_search
        tried.append(point.load)
        return {"meets_goal": point.load <= 0.7}

    found = highest_load(Point("agent", 8, "round-robin", 0.0, 60.0), run)
    assert 0.7 / 1.12 < found <= 0.7
    assert len(tried) == 5
