"""Products with fp8 weights that have a scale per block, interpreted, against what the 8-bit numbers stand for."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from tests.kernels.tensors import random
from trunkline_kernels.gpu.persistent_linear import (
    PersistentTiling,
    ProductRoom,
    add_persistent_linear,
    persistent_gated_linear,
    persistent_linear,
)
from trunkline_kernels.gpu.quantized_linear import (
    Fp8Tiling,
    library_takes,
    quantize_groups,
    quantize_rows,
    quantized_linear,
)
from trunkline_kernels.quantized_weight import BLOCK, FP8, QuantizedWeight, dequantize, quantize, quantize_blocks
from trunkline_kernels.silu_and_mul import silu_and_mul

# Rows, columns, inner: blocks at the ends may be smaller.
SHAPES = [(1, 128, 128), (17, 130, 300), (3, 70, 512), (5, 384, 80)]
DESCRIBED = [(1, 128, 128), (17, 130, 304), (3, 70, 512), (5, 384, 80)]  # rows of a multiple of 16 bytes
TILINGS = [PersistentTiling(16, 64, BLOCK, 4, 1, 1), PersistentTiling(32, 128, BLOCK, 4, 1, 2)]


@pytest.fixture(autouse=True)
def uninitialised_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def drawn(columns: int, inner: int, seed: int = 0) -> QuantizedWeight:
    """A weight whose blocks differ in size, so that a scale of another block is noticed."""
    generator = torch.Generator().manual_seed(seed + columns + inner)
    data = torch.randn(columns, inner, generator=generator).to(FP8)
    scale = 2.0 ** torch.randint(-3, 4, (-(-columns // BLOCK), -(-inner // BLOCK)), generator=generator)
    return QuantizedWeight("fp8", data, scale, inner)


def product_of(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """The sum over slices of the inner dimension, as DeepSeek-V3's report defines it."""
    narrow, factors = quantize_groups(x)
    total = torch.zeros(len(x), len(weight.data))
    for at, factor in enumerate(factors):
        part = slice(at * BLOCK, (at + 1) * BLOCK)
        of_columns = weight.scale[:, at].repeat_interleave(BLOCK)[: len(weight.data)]
        total += narrow[:, part].float() @ weight.data[:, part].float().t() * factor[:, None] * of_columns
    return total


def room_for(tiling: PersistentTiling, multiprocessors: int) -> ProductRoom:
    return ProductRoom.allocate([tiling], multiprocessors=multiprocessors, device=torch.device("cpu"))


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("columns", "inner"), [(128, 256), (130, 300), (5, 7)])
def test_a_block_has_one_scale_and_keeps_three_bits(columns: int, inner: int) -> None:
    weight = random(columns, inner)
    weight[:BLOCK, :BLOCK] *= 1000  # other blocks are not rounded for that
    narrow = quantize_blocks(weight)
    assert narrow.in_blocks
    assert narrow.scale.shape == (-(-columns // BLOCK), -(-inner // BLOCK))
    for row in range(0, columns, BLOCK):
        for column in range(0, inner, BLOCK):
            block = (slice(row, row + BLOCK), slice(column, column + BLOCK))
            wide = weight[block]
            stands_for = narrow.data[block].float() * narrow.scale[row // BLOCK, column // BLOCK]
            assert torch.equal(dequantize(narrow)[block], stands_for)
            assert torch.all((stands_for - wide).abs() <= wide.abs() / 16 + wide.abs().max() / 448 / 64)


@pytest.mark.parametrize(("rows", "inner"), [(3, 300), (1, 128), (2, 7), (0, 128)])
def test_activations_have_a_scale_for_each_128_elements_of_a_row(rows: int, inner: int) -> None:
    """Values that 8 bits hold exactly: the interpreter rounds others differently than devices."""
    values = random(rows, inner).to(FP8).float()
    values[:, ::BLOCK] = 448.0
    groups = -(-inner // BLOCK)
    factors = 2.0 ** torch.arange(rows * groups).view(groups, rows)
    x = values * factors.repeat_interleave(BLOCK, dim=0)[:inner].t()
    narrow, scale = quantize_groups(x)
    assert torch.equal(scale, factors)
    assert torch.equal(narrow.float(), values)


def test_a_row_that_one_group_holds_is_rounded_as_a_whole_row() -> None:
    x = random(3, 100)
    of_rows, of_groups = quantize_rows(x), quantize_groups(x)
    assert torch.equal(of_rows[0].float(), of_groups[0].float())
    assert torch.equal(of_rows[1], of_groups[1][0])


@pytest.mark.parametrize("tiling", [None, Fp8Tiling(16, 32, BLOCK, 4, 1), Fp8Tiling(32, 128, BLOCK, 4, 1)])
@pytest.mark.parametrize(("rows", "columns", "inner"), [*SHAPES, (0, 128, 128)])
def test_products(rows: int, columns: int, inner: int, tiling: Fp8Tiling | None) -> None:
    x, weight, bias = random(rows, inner), drawn(columns, inner), random(columns)
    assert_close(quantized_linear(x, weight, tiling=tiling), product_of(x, weight))
    assert_close(quantized_linear(x, weight, bias, tiling), product_of(x, weight) + bias)


def test_a_product_is_near_that_of_the_weight_itself() -> None:
    x, weight = random(9, 512), random(256, 512)
    expected = linear(x, weight)
    worst = (quantized_linear(x, quantize_blocks(weight)) - expected).abs().max() / expected.abs().max()
    assert worst < 0.1


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
@pytest.mark.parametrize("multiprocessors", [1, 7])
@pytest.mark.parametrize(("rows", "columns", "inner"), DESCRIBED)
def test_persistent_products(
    rows: int, columns: int, inner: int, multiprocessors: int, tiling: PersistentTiling
) -> None:
    x, weight, room = random(rows, inner), drawn(columns, inner), room_for(tiling, multiprocessors)
    expected = product_of(x, weight)
    assert_close(persistent_linear(x, weight, tiling, room), expected)
    residual = random(rows, columns)
    sums = residual + expected
    add_persistent_linear(x, weight, tiling, room, out=residual)
    assert_close(residual, sums)


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
@pytest.mark.parametrize(("rows", "columns", "inner"), [(17, 128, 304), (3, 384, 80)])
def test_gated_products(rows: int, columns: int, inner: int, tiling: PersistentTiling) -> None:
    x, weight, room = random(rows, inner), drawn(2 * columns, inner), room_for(tiling, 5)
    assert_close(persistent_gated_linear(x, weight, tiling, room), silu_and_mul(product_of(x, weight)))


@pytest.mark.parametrize("gated", [False, True])
def test_tiles_that_programs_share(gated: bool) -> None:
    tiling = PersistentTiling(16, 128, BLOCK, 4, 1, 1, least_saved=1)
    columns, inner = 128, 1040
    x, weight, room = random(5, inner), drawn(columns * (1 + gated), inner), room_for(tiling, 4)
    expected = product_of(x, weight)
    if gated:
        assert_close(persistent_gated_linear(x, weight, tiling, room), silu_and_mul(expected))
    else:
        assert_close(persistent_linear(x, weight, tiling, room), expected)
    assert not room.shares.isnan().all(), "no tile was cut"


def test_the_librarys_product_has_scales_of_rows_and_columns() -> None:
    assert library_takes(quantize(random(128, 128), "fp8"))
    assert not library_takes(quantize_blocks(random(128, 128)))
