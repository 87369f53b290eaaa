"""Which kernel computes a product of 8-bit floats is what was timed on the device."""

from pathlib import Path

import pytest

from trunkline_bench.gpu.kernels.product_sweep import winner
from trunkline_kernels.gpu import tuned_tilings
from trunkline_kernels.gpu.persistent_linear import PersistentTiling
from trunkline_kernels.gpu.product_choice import (
    LEAST_GAIN,
    ProductChoice,
    ProductTiling,
    product_choice,
    untimed_choice,
)
from trunkline_kernels.gpu.quantized_linear import Fp8Tiling
from trunkline_kernels.gpu.tuned_tilings import ADDED, GATED, LINEAR, PRODUCTS, ProductKey, TilingKey

SMALL = {"rows": 16, "columns": 32, "inner": 64, "warps": 4, "stages": 3}
LARGE = {**SMALL, "rows": 128, "programs": 1}


def key_of(kernel: str, rows: int, dtype: str = "float8_e4m3fn") -> ProductKey:
    return ProductKey(kernel, "NVIDIA H200", rows, 12_288, 4096, dtype)


def choice(kernel: str = GATED, device: str = "NVIDIA H200", columns: int = 12_288) -> ProductChoice:
    return product_choice(kernel, device=device, columns=columns, inner=4096)


@pytest.fixture
def timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An own kernel won for up to 8 and another for up to 256 rows, the library in between."""
    file = tmp_path / "tuned.json"
    for rows, tiling in ((256, LARGE), (8, SMALL), (64, {})):
        tuned_tilings.write(file, {key_of(GATED, rows): (tiling, {"library_us": 80.0})})
    monkeypatch.setenv(tuned_tilings.VARIABLE, str(file))
    return file


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (1, Fp8Tiling(**SMALL)),
        (8, Fp8Tiling(**SMALL)),
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


def test_the_library_computes_only_what_was_timed(timed: Path) -> None:
    assert choice(device="NVIDIA L4") == choice(LINEAR) == choice(ADDED) == choice(columns=4096) == ProductChoice()
    assert ProductChoice().tiling(1) is None
    assert not ProductChoice().library_won(1)
    assert [choice().library_won(rows) for rows in (1, 8, 9, 64, 65, 256, 257)] == [
        False, False, True, True, False, False, False
    ]  # fmt: skip


def test_products_of_one_shape_and_different_ends_have_entries_of_their_own(timed: Path) -> None:
    """A product that is added to the residual stream and one that is stored alone may have different winners."""
    other = {**LARGE, "columns": 64}
    tuned_tilings.write(timed, {key_of(ADDED, 8): (other, {})})
    assert choice(ADDED).tiling(8) == PersistentTiling(**other)
    assert choice().tiling(8) == Fp8Tiling(**SMALL)


def test_entries_of_other_types_are_not_used(timed: Path) -> None:
    tuned_tilings.write(timed, {key_of(LINEAR, 8, "bfloat16"): (LARGE, {})})
    assert choice(LINEAR) == ProductChoice()


@pytest.mark.parametrize(
    ("kernel", "fields"), [(LINEAR, {"keys": 64}), (GATED, {**LARGE, "keys": 64}), (GATED, {"rows": 16})]
)
def test_an_entry_with_other_fields_is_named(kernel: str, fields: dict[str, int], timed: Path) -> None:
    tuned_tilings.write(timed, {key_of(kernel, 32): (fields, {})})
    with pytest.raises(ValueError, match=f"a tiling of {kernel} has other fields than"):
        choice(kernel)


BLOCKS = {**LARGE, "columns": 64, "inner": 128}


def test_weights_in_blocks_have_entries_of_their_own(timed: Path) -> None:
    tuned_tilings.write(timed, {key_of(GATED, 8, "float8_e4m3fn in blocks"): (BLOCKS, {})})
    found = product_choice(GATED, device="NVIDIA H200", columns=12_288, inner=4096, in_blocks=True)
    assert found == ProductChoice((8,), (PersistentTiling(**BLOCKS),))
    assert choice().tiling(8) == Fp8Tiling(**SMALL)


@pytest.mark.parametrize("change", [{"inner": 64}, {"columns": 256}, {"columns": 48}])
def test_a_tile_that_does_not_fit_the_blocks_is_named(change: dict[str, int], timed: Path) -> None:
    """It would be multiplied by the scales of other blocks."""
    tuned_tilings.write(timed, {key_of(GATED, 8, "float8_e4m3fn in blocks"): ({**BLOCKS, **change}, {})})
    with pytest.raises(ValueError, match="a tiling of gated_linear with a weight in blocks of 128 is Persistent"):
        product_choice(GATED, device="NVIDIA H200", columns=12_288, inner=4096, in_blocks=True)


@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize("kernel", PRODUCTS)
def test_products_that_were_not_timed(kernel: str, in_blocks: bool) -> None:
    with_library, without = (
        untimed_choice(kernel, columns=12_288, inner=4096, in_blocks=in_blocks, library=library)
        for library in (True, False)
    )
    for rows in (1, 64, 128):
        tiling = with_library.tiling(rows)
        assert isinstance(tiling, PersistentTiling)
        assert tiling == without.tiling(rows)
    for rows in (129, 8192):
        assert with_library.library_won(rows)
        assert isinstance(without.tiling(rows), PersistentTiling)
    fitting = [tiling for tiling in (*with_library.tilings, *without.tilings) if tiling]
    assert not in_blocks or all(tiling.inner == 128 and 128 % tiling.columns == 0 for tiling in fitting)


@pytest.mark.parametrize(
    ("kernel", "columns", "inner", "in_blocks", "has_one"),
    [
        (GATED, 12_352, 4096, True, False),  # gate and up share a block
        (GATED, 12_352, 4096, False, True),
        (LINEAR, 12_352, 4096, True, True),
        (ADDED, 4096, 4104, True, False),  # rows that a descriptor cannot describe
        (ADDED, 4096, 4104, False, False),
    ],
)
def test_shapes_that_persistent_kernels_do_not_take(
    kernel: str, columns: int, inner: int, in_blocks: bool, has_one: bool
) -> None:
    found = untimed_choice(kernel, columns=columns, inner=inner, in_blocks=in_blocks, library=False)
    assert (found != ProductChoice()) == has_one


def test_a_sweep_adds_to_the_table_and_replaces_what_it_has_timed_again(timed: Path) -> None:
    attention = TilingKey("decode_attention", "NVIDIA H200", 128, 4, "bfloat16", "bfloat16")
    tuned_tilings.write(timed, {attention: ({"keys": 64}, {})})
    again = key_of(GATED, 64)
    tuned_tilings.write(timed, {again: (LARGE, {})})
    found = tuned_tilings.table(timed)
    assert found[attention] == {"keys": 64}
    assert found[again] == LARGE
    assert len(found) == 4


def test_the_own_kernel_must_win_by_more_than_chance() -> None:
    slow, fast = Fp8Tiling(**SMALL), PersistentTiling(**LARGE)
    assert winner(1.0, {}) is None
    assert winner(1.0, {slow: 0.9, fast: 0.8}) == fast
    assert winner(1.0, {slow: 2.0, fast: 1.0 / LEAST_GAIN + 1e-6}) is None
