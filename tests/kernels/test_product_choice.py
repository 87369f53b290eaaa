"""Which kernel computes a product is what was timed on the device, and the library's where nothing was."""

from pathlib import Path

import pytest
import torch

from trunkline_bench.gpu.kernels.product_sweep import winner
from trunkline_kernels.gpu import tuned_tilings
from trunkline_kernels.gpu.gated_linear import GatedTiling
from trunkline_kernels.gpu.persistent_linear import PersistentTiling
from trunkline_kernels.gpu.product_choice import LEAST_GAIN, ProductChoice, ProductTiling, product_choice
from trunkline_kernels.gpu.quantized_linear import FP8, Fp8Tiling
from trunkline_kernels.gpu.tuned_tilings import ADDED, GATED, LINEAR, ProductKey, TilingKey

SMALL = {"rows": 16, "columns": 32, "inner": 64, "warps": 4, "stages": 3}
LARGE = {**SMALL, "rows": 128, "programs": 1}


def choice(
    kernel: str = GATED, device: str = "NVIDIA H200", dtype: torch.dtype = torch.bfloat16, columns: int = 12_288
) -> ProductChoice:
    return product_choice(kernel, device=device, columns=columns, inner=4096, dtype=dtype)


@pytest.fixture
def timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An own kernel won for up to 8 and another for up to 256 rows, the library in between."""
    file = tmp_path / "tuned.json"
    for rows, tiling in ((256, LARGE), (8, SMALL), (64, {})):
        key = ProductKey(GATED, "NVIDIA H200", rows, 12_288, 4096, "bfloat16")
        tuned_tilings.write(file, {key: (tiling, {"library_us": 80.0})})
    monkeypatch.setenv(tuned_tilings.VARIABLE, str(file))
    return file


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (1, GatedTiling(**SMALL)),
        (8, GatedTiling(**SMALL)),
        (9, None),
        (64, None),
        (65, PersistentTiling(**LARGE)),
        (256, PersistentTiling(**LARGE)),
        (257, None),
    ],
)
def test_a_number_of_rows_goes_the_way_of_the_next_one_that_was_timed(
    timed: Path, rows: int, expected: ProductTiling | None
) -> None:
    assert choice().tiling(rows) == expected


def test_what_was_not_timed_goes_the_librarys_way(timed: Path) -> None:
    assert choice(device="NVIDIA L4") == choice(dtype=torch.float16) == ProductChoice()
    assert choice(LINEAR) == choice(ADDED) == choice(columns=4096) == ProductChoice()
    assert ProductChoice().tiling(1) is None


def test_products_of_one_shape_and_different_ends_have_entries_of_their_own(timed: Path) -> None:
    """A product that is added to the residual stream and one that is stored alone may have different winners."""
    other = {**LARGE, "columns": 64}
    tuned_tilings.write(timed, {ProductKey(ADDED, "NVIDIA H200", 8, 12_288, 4096, "bfloat16"): (other, {})})
    assert choice(ADDED).tiling(8) == PersistentTiling(**other)
    assert choice().tiling(8) == GatedTiling(**SMALL)


def test_products_of_8_bit_floats_have_entries_of_their_own(timed: Path) -> None:
    """Without one they go our own way: only where the library was timed and won is it asked."""
    for rows, tiling in ((8, SMALL), (64, {}), (256, LARGE)):
        key = ProductKey(LINEAR, "NVIDIA H200", rows, 12_288, 4096, "float8_e4m3fn")
        tuned_tilings.write(timed, {key: (tiling, {})})
    found = choice(LINEAR, dtype=FP8)
    assert [found.tiling(rows) for rows in (8, 9, 65, 257)] == [
        Fp8Tiling(**SMALL), None, PersistentTiling(**LARGE), None
    ]  # fmt: skip
    assert [found.library_won(rows) for rows in (1, 8, 9, 64, 65, 256, 257)] == [
        False, False, True, True, False, False, False
    ]  # fmt: skip
    assert not choice(ADDED, dtype=FP8).library_won(1)


@pytest.mark.parametrize(
    ("kernel", "fields"), [(LINEAR, SMALL), (ADDED, {}), (GATED, {**LARGE, "keys": 64}), (GATED, {"rows": 16})]
)
def test_an_entry_with_other_fields_is_named(kernel: str, fields: dict[str, int], timed: Path) -> None:
    key = ProductKey(kernel, "NVIDIA H200", 32, 12_288, 4096, "bfloat16")
    tuned_tilings.write(timed, {key: (fields or {"keys": 64}, {})})
    with pytest.raises(ValueError, match=f"a tiling of {kernel} has other fields than"):
        choice(kernel)


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
    slow, fast = GatedTiling(**SMALL), PersistentTiling(**LARGE)
    assert winner(1.0, {}) is None
    assert winner(1.0, {slow: 0.9, fast: 0.8}) == fast
    assert winner(1.0, {slow: 2.0, fast: 1.0 / LEAST_GAIN + 1e-6}) is None
