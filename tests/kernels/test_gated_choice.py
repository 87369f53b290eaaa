"""Which way gate and up go is what was timed on the device, and the library's where nothing was."""

from pathlib import Path

import pytest
import torch

from trunkline_bench.gpu.product_sweep import winner
from trunkline_kernels.gpu import tuned_tilings
from trunkline_kernels.gpu.gated_choice import LEAST_GAIN, GatedChoice, gated_choice
from trunkline_kernels.gpu.gated_linear import GatedTiling
from trunkline_kernels.gpu.tuned_tilings import GATED, ProductKey, TilingKey

SMALL = {"rows": 16, "columns": 32, "inner": 64, "warps": 4, "stages": 3}
LARGE = {**SMALL, "rows": 128}


def choice(device: str = "NVIDIA H200", dtype: torch.dtype = torch.bfloat16) -> GatedChoice:
    return gated_choice(device=device, columns=12_288, inner=4096, dtype=dtype)


@pytest.fixture
def timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The own kernel won for up to 8 and up to 256 rows, the library in between."""
    file = tmp_path / "tuned.json"
    for rows, tiling in ((256, LARGE), (8, SMALL), (64, {})):
        key = ProductKey(GATED, "NVIDIA H200", rows, 12_288, 4096, "bfloat16")
        tuned_tilings.write(file, {key: (tiling, {"library_us": 80.0})})
    monkeypatch.setenv(tuned_tilings.VARIABLE, str(file))
    return file


@pytest.mark.parametrize(
    ("rows", "expected"), [(1, SMALL), (8, SMALL), (9, None), (64, None), (65, LARGE), (256, LARGE), (257, None)]
)
def test_a_number_of_rows_goes_the_way_of_the_next_one_that_was_timed(
    timed: Path, rows: int, expected: dict[str, int] | None
) -> None:
    assert choice().tiling(rows) == (GatedTiling(**expected) if expected else None)


def test_what_was_not_timed_goes_the_librarys_way(timed: Path) -> None:
    assert choice(device="NVIDIA L4") == choice(dtype=torch.float16) == GatedChoice()
    assert GatedChoice().tiling(1) is None


def test_a_sweep_adds_to_the_table_and_replaces_what_it_has_timed_again(timed: Path) -> None:
    attention = TilingKey("decode_attention", "NVIDIA H200", 128, 4, "bfloat16", "bfloat16")
    tuned_tilings.write(timed, {attention: ({"keys": 64}, {})})
    again = ProductKey(GATED, "NVIDIA H200", 64, 12_288, 4096, "bfloat16")
    tuned_tilings.write(timed, {again: (LARGE, {})})
    found = tuned_tilings.table(timed)
    assert found[attention] == {"keys": 64}
    assert found[again] == LARGE
    assert len(found) == 4


def test_the_own_kernel_must_win_by_more_than_chance() -> None:
    slow, fast = GatedTiling(**SMALL), GatedTiling(**LARGE)
    assert winner(1.0, {}) is None
    assert winner(1.0, {slow: 0.9, fast: 0.8}) == fast
    assert winner(1.0, {slow: 2.0, fast: 1.0 / LEAST_GAIN + 1e-6}) is None
