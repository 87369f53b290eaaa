"""The table of tilings: what is in it is used, what is wrong in it is said, and every entry compiles."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from trunkline_kernels.gpu import tuned_tilings
from trunkline_kernels.gpu.decode_tiling import DecodeTiling, decode_tiling_for
from trunkline_kernels.gpu.product_choice import product_tiling
from trunkline_kernels.gpu.prompt_attention import KERNEL, OWN
from trunkline_kernels.gpu.ragged_attention import RaggedTiling, tiling_for
from trunkline_kernels.gpu.tuned_tilings import ProductKey, TilingKey

DECODE = {"keys": 32, "warps": 8, "stages": 2, "programs": 5, "shortest": 96}
RAGGED = {"rows": 64, "keys": 32, "warps": 4, "stages": 2}
QWEN: dict[str, Any] = {"head_dim": 128, "group": 4, "dtype": torch.bfloat16, "kv_dtype": torch.bfloat16}


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "tuned.json"
    tilings: dict[TilingKey | ProductKey, tuple[dict[str, int], dict[str, list[float]]]] = {
        TilingKey.of(kernel, device="NVIDIA H200", **QWEN): (tiling, {"us": [400.0]})
        for kernel, tiling in (("decode_attention", DECODE), ("ragged_attention", RAGGED))
    }
    tuned_tilings.write(file, tilings)
    monkeypatch.setenv(tuned_tilings.VARIABLE, str(file))
    return file


def decode(**other: Any) -> DecodeTiling:
    return decode_tiling_for(**{**QWEN, "shared_memory": 227 << 10, "device": "NVIDIA H200", **other})


def ragged(**other: Any) -> RaggedTiling:
    return tiling_for(**{**QWEN, "shared_memory": 227 << 10, "device": "NVIDIA H200", **other})


def test_what_was_measured_is_used(measured: Path) -> None:
    assert decode() == DecodeTiling(**DECODE)
    assert ragged() == RaggedTiling(**RAGGED)


@pytest.mark.parametrize("other", [{"device": "NVIDIA L4"}, {"group": 8}, {"head_dim": 64}, {"kv_dtype": torch.int8}])
def test_what_was_not_measured_gets_a_tiling_all_the_same(measured: Path, other: dict[str, Any]) -> None:
    assert decode(**other) != DecodeTiling(**DECODE)
    assert ragged(**other) != RaggedTiling(**RAGGED)


@pytest.mark.parametrize(
    ("shared_memory", "kv_dtype", "programs"),
    [
        (227 << 10, torch.bfloat16, 3),  # H200
        (227 << 10, torch.float8_e4m3fn, 2),
        (163 << 10, torch.bfloat16, 3),  # A100
        (99 << 10, torch.bfloat16, 2),  # L4
        (64 << 10, torch.bfloat16, 1),  # MI300X
    ],
)
def test_as_many_programs_as_shared_memory_holds(shared_memory: int, kv_dtype: torch.dtype, programs: int) -> None:
    assert decode(device="", shared_memory=shared_memory, kv_dtype=kv_dtype).programs == programs


def test_deterministic_prefill_keeps_its_tiling(measured: Path) -> None:
    assert ragged(split=True) == ragged(split=True, device="")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "JSONDecodeError"),
        ('[{"tiling": {}}]', "KeyError"),
        ('[{"for": {"kernel": "x"}, "tiling": {}}]', "TypeError"),
        ("{}", "ValueError: it holds no list"),
    ],
)
def test_a_broken_table_is_named(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "broken.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=f"broken.json is not a table of tilings: {named}"):
        tuned_tilings.table(file)


@pytest.mark.parametrize("value", [0, -1, "64", 1.5, True, 1 << 20])
def test_a_number_that_is_none_is_named(measured: Path, tmp_path: Path, value: object) -> None:
    entries = json.loads(measured.read_text())
    entries[0]["tiling"]["keys"] = value
    file = tmp_path / "wrong.json"
    file.write_text(json.dumps(entries))
    with pytest.raises(ValueError, match="keys is"):
        tuned_tilings.table(file)


def test_two_tilings_for_the_same_thing_are_refused(measured: Path, tmp_path: Path) -> None:
    file = tmp_path / "twice.json"
    file.write_text(json.dumps(json.loads(measured.read_text()) * 2))
    with pytest.raises(ValueError, match="two tilings for the same thing"):
        tuned_tilings.table(file)


def test_the_shipped_table_is_one() -> None:
    for key, fields in tuned_tilings.table(tuned_tilings.SHIPPED).items():
        if isinstance(key, ProductKey):
            assert not fields or product_tiling(key.kernel, fields)
        elif key.kernel == KERNEL:
            assert fields in ({}, OWN)
        else:
            assert {"decode_attention": DecodeTiling, "ragged_attention": RaggedTiling}[key.kernel](**fields)


# All of them take the compiler several minutes.
@pytest.mark.slow
def test_some_tilings_compile_without_spills() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "trunkline_bench.kernels.tiling_resources", "--every", "4"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "programs at once" in done.stdout


@pytest.mark.parametrize(
    ("tiling", "registers"),
    [
        (DecodeTiling(64, 4, 3, 3), 168),  # 65,536 / (3 * 128), a multiple of 8
        (DecodeTiling(64, 8, 3, 2), 128),
        (DecodeTiling(64, 4, 2, 1), 255),  # a thread has no more
        (DecodeTiling(64, 4, 3, 6), None),  # more programs than ever run at once
    ],
)
def test_the_compiler_is_told_how_many_registers_the_programs_leave_each_other(
    tiling: DecodeTiling, registers: int | None
) -> None:
    assert tiling.options(narrow=True).get("maxnreg") == registers
    assert "maxnreg" not in tiling.options(narrow=False)
