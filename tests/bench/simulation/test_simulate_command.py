"""`trunkline bench simulate`: an invalid argument is an error of one line that names the flag, before any run."""

import json
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.bench.simulation.commands import status_of
from trunkline_bench.simulation import main


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    entry = {"timestamp": 0, "input_length": 5, "output_length": 3, "hash_ids": [1]}
    path.write_text(json.dumps(entry) + "\n" + json.dumps(entry | {"timestamp": 1000, "output_length": 4}))
    return path


command = partial(status_of, main.main)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("--interactive-reserve 5", "--interactive-reserve: 5 is out of range; allowed: 0 to 0.9"),
        ("--interactive-reserve nan", "--interactive-reserve: nan is out of range"),
        ("--batching dynamic --batch-window-ms inf", "--batch-window-ms: inf is out of range"),
        ("--itl-target-ms inf", "--itl-target-ms: inf is out of range; allowed: 0 to 60000"),
        ("--rate inf", "--rate: inf is out of range"),
        ("--rate 0", "--rate: 0 is out of range"),
        ("--limit 99999999999999999999999", "--limit: 99999999999999999999999 is out of range"),
        ("--limit all", "--limit: invalid number value: 'all'"),
        ("--window-s 0 inf", "--window-s: inf is out of range"),
        ("--window-s 5 3", "--window-s 5 3: "),
        ("--block-size 100000000", "--block-size: 100000000 is out of range; allowed: 1 to 256"),
        ("--kv-blocks 99999999999", "--kv-blocks: 99999999999 is out of range"),
        ("--kv-blocks 1 --block-size 1", "--kv-blocks 1 of --block-size 1: every request would be refused"),
        ("--max-step-tokens 0", "--max-step-tokens: 0 is out of range"),
        ("--admission never", "--admission: invalid choice: 'never'"),
        ("--batching clever", "--batching: 'clever'"),
        ("--colour red", "unrecognized arguments: --colour red"),
    ],
)
def test_a_bad_value_is_one_line_that_names_the_flag(
    trace: Path, capsys: pytest.CaptureFixture[str], arguments: str, problem: str
) -> None:
    assert command("--trace", trace, *arguments.split()) == 2
    told = capsys.readouterr()
    assert told.err.startswith("trunkline bench simulate: ")
    assert told.err.count("\n") == 1
    assert problem in told.err
    assert not told.out


def test_a_missing_trace_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert command() == 2
    error = capsys.readouterr().err
    assert error == "trunkline bench simulate: the following arguments are required: --trace\n"


def test_a_prompt_longer_than_the_context_leaves_nothing_to_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,900000000,3\n")
    assert command("--trace", path) == 2
    error = capsys.readouterr().err
    assert "every request would be refused; the shortest prompt has 900,000,000 tokens" in error
    assert error.count("\n") == 1


@pytest.fixture
def no_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(main, "replay")


@pytest.mark.usefixtures("no_runs")
@pytest.mark.parametrize("place", ["trace.jsonl", "trace.jsonl/below", "/proc/nothing"])
def test_an_output_folder_that_cannot_be_created_is_an_error_before_the_runs(
    trace: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    folder = trace.parent / place
    assert command("--trace", trace, "--output", folder) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"trunkline bench simulate: --output {folder}: ")
    assert error.count("\n") == 1


@pytest.mark.usefixtures("no_runs")
def test_a_missing_matplotlib_is_an_error_before_the_runs(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "trunkline_bench.simulation.plots", None)
    assert command("--trace", trace, "--output", trace.parent / "out") == 2
    assert "--output needs matplotlib, of the extra trunkline[bench]" in capsys.readouterr().err
    assert not (trace.parent / "out").exists()


def test_a_plot_that_cannot_be_written_is_an_error_after_the_table(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = trace.parent / "out"
    (out / "ttft-cdf.png").mkdir(parents=True)
    assert command("--trace", trace, "--output", out) == 2
    told = capsys.readouterr()
    assert "| continuous |" in told.out
    assert told.err.splitlines()[-1] == f"trunkline bench simulate: --output {out}: Is a directory"


def test_a_trace_with_several_lanes_has_a_row_for_each(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entries = [json.loads(line) for line in trace.read_text().splitlines()]
    trace.write_text("\n".join(json.dumps(e | {"lane": lane}) for e in entries for lane in ("interactive", "batch")))
    assert command("--trace", trace) == 0
    rows = [line.split(" | ")[0] for line in capsys.readouterr().out.splitlines()[2:5]]
    assert rows == ["| continuous, all lanes", "| continuous, interactive", "| continuous, batch"]
