"""The stages of `make bench-gpu` run, tiny and interpreted; a failing stage does not affect the others."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.worker.engine_rig import DEMO_MODEL
from trunkline_bench.gpu.engine.costs import tuned_fp8
from trunkline_bench.gpu.kernels.attention import layouts_speed
from trunkline_bench.gpu.main import main, run
from trunkline_bench.gpu.shapes import Shapes
from trunkline_bench.gpu.stages import CALL_S, STAGES, Stage
from trunkline_bench.simulation.costs.fitted_cost import FittedCost
from trunkline_kernels.gpu.prompt_attention import KERNEL, OWN
from trunkline_kernels.gpu.tuned_tilings import ADDED, GATED, LINEAR, ProductKey, TilingKey, table

REPOSITORY = Path(__file__).parents[3]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "trunkline_bench.gpu.main", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def stages_in(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("20*.json")
    stages: dict[str, Any] = json.loads(path.read_text())["stages"]
    return stages


def misbehaving(*names: str, limit_s: float = 60.0) -> list[Stage]:
    return [Stage(name, f"tests.bench.gpu.misbehaving_stages:{name}", 1, 1, limit_s) for name in names]


def two_layers(folder: Path) -> Path:
    """The first two layers of the demo model: each layer of a step takes Triton's interpreter 0.1 s."""
    shutil.copytree(DEMO_MODEL, folder)
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name: tensor for name, tensor in weights.items() if not re.match(r"model\.layers\.[2-9]", name)},
        folder / "model.safetensors",
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    return folder


# Sixteen processes one after another; each imports torch, and most start an engine or two.
@pytest.mark.slow
def test_every_stage_runs(tmp_path: Path) -> None:
    model = two_layers(tmp_path / "model")
    done = bench("--tiny", str(model), "--output", str(tmp_path), "--minutes", "30")
    assert done.returncode == 0, done.stdout + done.stderr
    stages = stages_in(tmp_path)
    assert list(stages) == [stage.name for stage in STAGES if not stage.instead_of]
    assert all(stage["rows"] and stage["ended"] == "done" for stage in stages.values())
    whats = [row["what"] for row in stages["smoke"]["rows"]]
    assert {"copy", "captured graph", "decode attention", "rms_norm", "tokens equal the CPU's"} <= set(whats)
    rows = {row["what"]: row for stage in stages.values() for row in stage["rows"] if "what" in row}
    assert rows["2 x (9 in, 3 out)"]["finished"]
    assert rows["--deterministic"]["of_plain"] > 0
    assert rows["generate, sdpa"]["output_tok_per_s"] > 0
    assert any(what.startswith("generate_batch") and "output_tok_per_s" in row for what, row in rows.items())
    # The simulator accepts the fitted times of the engine's steps as a profile.
    FittedCost.from_json((tmp_path / "8b-fitted.json").read_text())
    the_sweeps_wrote_a_table_that_the_kernels_take(stages, tmp_path / "tuned.json")


def the_sweeps_wrote_a_table_that_the_kernels_take(stages: dict[str, Any], written: Path) -> None:
    rows = stages["tiling sweep"]["rows"]
    assert {row["what"] for row in rows} == {"decode_attention", "ragged_attention", KERNEL}
    found = table(written)
    assert {key.kernel for key in found} == {"decode_attention", "ragged_attention", KERNEL, GATED, LINEAR, ADDED}
    best = {(row["what"], row["kv_dtype"]): row for row in rows if row.get("best_so_far")}
    assert {kv_dtype for _, kv_dtype in best} == {"float32", "float8_e4m3fn"}
    tilings = {(key.kernel, key.kv_dtype): fields for key, fields in found.items() if isinstance(key, TilingKey)}
    (choice,) = (row for row in rows if row["what"] == KERNEL)
    assert tilings.pop((KERNEL, "float32")) == ({} if choice["library"] else OWN)
    assert all(fields.items() <= best[key].items() for key, fields in tilings.items())
    for stage, dtype, numbers in (
        ("product sweep", "float8_e4m3fn", (1, 20)),
        ("block product sweep", "float8_e4m3fn in blocks", (20,)),
    ):
        timed = stages[stage]["rows"]
        kinds = {True: "persistent", False: "own"}
        products = {
            (key.kernel, key.rows): kinds["programs" in fields] if fields else "library"
            for key, fields in found.items()
            if isinstance(key, ProductKey) and key.dtype == dtype
        }
        names = {GATED: "gate and up", LINEAR: "qkv"}
        chosen = {(row["what"], row["rows"]): row["kernel"] for row in timed if "kernel" in row}
        for (kernel, rows_of), kind in products.items():
            assert kernel == ADDED or chosen[f"{names[kernel]}, chosen", rows_of] == kind
        assert products.keys() == {(kernel, rows_of) for kernel in (GATED, LINEAR, ADDED) for rows_of in numbers}
        ways = {f"{name}, {way}" for name in ("gate and up", "down", "qkv", "output") for way in ("own", "persistent")}
        assert {row["what"] for row in timed if "of_library" in row} == ways


def test_a_run_with_a_tuned_table_needs_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="run the product sweep first"):
        next(iter(tuned_fp8(Shapes.of(torch.device("cpu"), tmp_path, DEMO_MODEL))))


def test_pools_of_one_layer_and_of_many_are_measured(tmp_path: Path) -> None:
    shapes = Shapes.of(torch.device("cpu"), tmp_path, DEMO_MODEL)
    rows = list(layouts_speed(shapes, copy=1e9))
    assert [row["layers"] for row in rows] == [1, 3]
    assert all(row["gb_per_s"] > 0 and (row["batch"], row["context"]) == (2, 70) for row in rows)  # type: ignore[operator]
    assert rows[0]["of_one_layer"] == 1


@pytest.mark.slow
def test_a_failing_stage_does_not_affect_the_rows_of_other_stages(tmp_path: Path) -> None:
    stages = misbehaving("works", "raises", "is_killed", "loses_the_device")
    hanging = misbehaving("hangs", limit_s=4.0)  # 40 s with tiny shapes; it starts in 15 s on a busy machine
    again = Stage("works again", "tests.bench.gpu.misbehaving_stages:works", 1, 1, 60.0)
    instead = Stage("instead", "tests.bench.gpu.misbehaving_stages:works", 1, 1, 60.0, instead_of="raises")
    never = Stage("never", "tests.bench.gpu.misbehaving_stages:works", 1, 1, 60.0, instead_of="works")
    assert not run([*stages, *hanging, again, instead, never], tmp_path, tiny=DEMO_MODEL, seconds=600)
    found = stages_in(tmp_path)
    rows = {name: [row["what"] for row in stage["rows"]] for name, stage in found.items()}
    assert rows == {
        "works": ["first", "second"],
        "raises": ["before it raised"],
        "is_killed": ["before it was killed"],
        "loses_the_device": ["before the device was lost"],
        "hangs": ["before it hung"],
        "works again": ["first", "second"],
        "instead": ["first", "second"],
    }
    ended = {name: stage["ended"] for name, stage in found.items()}
    assert ended["works"] == ended["works again"] == ended["instead"] == "done"
    assert ended["raises"] == "ValueError: the kernels disagree"
    assert ended["is_killed"] == "ended by SIGSEGV"
    assert ended["hangs"] == "not done after its limit of 40 s"
    assert "misbehaving_stages.py" in (tmp_path / "hangs.log").read_text(), "its log has the stacks"


@pytest.mark.slow
def test_a_stage_that_loses_the_device_is_run_again(tmp_path: Path) -> None:
    assert not run(misbehaving("loses_the_device"), tmp_path, tiny=DEMO_MODEL, seconds=600)
    (stage,) = stages_in(tmp_path).values()
    assert stage["ended"].endswith("noticed later")
    assert stage["again with launches that wait"].endswith("noticed at its launch")


def test_a_call_takes_no_longer_than_it_may(tmp_path: Path) -> None:
    assert not run(misbehaving("works"), tmp_path, tiny=DEMO_MODEL, seconds=1)
    assert stages_in(tmp_path)["works"]["ended"].startswith("not started")


def test_without_a_gpu_one_line_says_so(tmp_path: Path) -> None:
    done = bench("--output", str(tmp_path), "--only", "smoke")
    assert done.returncode == 1
    assert done.stderr.startswith("no GPU that torch can use: nothing is measured")
    assert done.stderr.count("\n") == 1


def test_an_unknown_stage_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["main", "--only", "speed"])
    with pytest.raises(SystemExit, match="there is no stage 'speed'"):
        main()


def test_each_planned_call_fits_its_time() -> None:
    for call in {stage.call for stage in STAGES}:
        planned_s = sum(stage.estimate_s for stage in STAGES if stage.call == call and not stage.instead_of)
        assert planned_s <= CALL_S, f"call {call} is estimated at {planned_s:.0f} s"
    assert [stage.call for stage in STAGES] == sorted(stage.call for stage in STAGES)
    assert all(stage.estimate_s < stage.limit_s <= CALL_S for stage in STAGES)


def test_the_documented_plan_matches_the_stages() -> None:
    text = (REPOSITORY / "docs" / "gpu-bench.md").read_text()
    rows = re.findall(r"^\| (\d) \| ([^|]+) \|[^|]*\| (\d+) \| (\d+) \|$", text, flags=re.MULTILINE)
    planned = [(str(s.call), s.name, f"{s.estimate_s:.0f}", f"{s.limit_s:.0f}") for s in STAGES]
    assert [tuple(cell.strip() for cell in row) for row in rows] == planned


def test_every_stage_function_exists() -> None:
    for stage in STAGES:
        module, _, name = stage.function.partition(":")
        assert callable(getattr(import_module(module), name))


def without(*packages: str) -> str:
    """Python code that hides these packages."""
    return f"import sys; sys.modules.update(dict.fromkeys({packages}))"


NOT_ON_A_GPU_MACHINE = (
    "structlog", "opentelemetry", "redis", "matplotlib", "uvloop", "grpc", "grpc_status", "jinja2", "pydantic",
)  # fmt: skip


@pytest.mark.slow
def test_the_stages_need_only_the_packages_of_a_gpu_machine() -> None:
    modules = ", ".join(sorted({stage.function.partition(":")[0] for stage in STAGES}))
    done = subprocess.run(
        [sys.executable, "-c", f"{without(*NOT_ON_A_GPU_MACHINE)}; import {modules}"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_kernels_are_measured_without_protobuf_too() -> None:
    absent = (*NOT_ON_A_GPU_MACHINE, "google.protobuf")
    modules = (
        "trunkline_bench.gpu.kernels.attention, trunkline_bench.gpu.kernels.token_wise, trunkline_bench.gpu.ceilings"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{without(*absent)}; import {modules}"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
