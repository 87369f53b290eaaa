"""`make bench-outputs`: random runs come out equal twice, and one bit of difference is found."""

import copy
import json
import sys
from pathlib import Path

import pytest
import torch

from trunkline_bench.engine import same_outputs
from trunkline_bench.engine.random_runs import random_run
from trunkline_bench.engine.same_outputs import REPOSITORY, difference, record
from trunkline_worker.model.loading import load_model
from trunkline_worker.model.registry import ARCHITECTURES


def test_there_are_random_checkpoints_of_every_architecture(tmp_path: Path) -> None:
    drawn = set()
    for index in range(150):
        random_run(tmp_path / "model", seed=0, index=index)
        (name,) = json.loads((tmp_path / "model" / "config.json").read_text())["architectures"]
        if name not in drawn:
            drawn.add(name)
            load_model(tmp_path / "model", device=torch.device("cpu"))
    assert drawn == set(ARCHITECTURES)


def test_a_run_is_drawn_from_its_number_alone(tmp_path: Path) -> None:
    first, again, other = (random_run(tmp_path / "model", seed=0, index=index) for index in (5, 5, 6))
    assert first == again
    assert first != other


def test_a_checkout_equals_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(same_outputs, "golden_runs", lambda _: [])
    argv = ["same_outputs", "--before", str(REPOSITORY), "--runs", "2", "--processes", "2"]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit) as ended:
        same_outputs.main()
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert "0 of 2 configurations differ" in told
    assert "- engines that failed: 0\n" in told


def test_one_bit_of_one_log_probability_is_a_difference(tmp_path: Path) -> None:
    run = random_run(tmp_path / "model", seed=0, index=0)
    (recorded,) = record(REPOSITORY, [run], 1)
    assert difference(recorded, copy.deepcopy(recorded)) is None
    changed = copy.deepcopy(recorded)
    handle = next(handle for handle, output in recorded["outputs"].items() if output["logprobs"])
    changed["outputs"][handle]["logprobs"][-1][1] += 2e-7
    found = difference(recorded, changed)
    assert found is not None
    assert found.startswith(f"request {handle}: logprobs[")


@pytest.mark.parametrize("name", ["tokens", "finish", "cached", "error"])
def test_anything_that_clients_see_is_compared(name: str) -> None:
    def recorded(value: object) -> dict[str, object]:
        return {"failure": "", "outputs": {"1": {name: value}}}

    assert difference(recorded([1]), recorded([1])) is None
    assert difference(recorded([1]), recorded([2])) == f"request 1: {name}[0]: 1 → 2"
    assert difference(recorded([1]), recorded([1, 2])) == f"request 1: {name}: [1] → [1, 2]"
    assert difference(recorded(None), recorded(1)) == f"request 1: {name}: None → 1"
