"""Products with quantised weights, interpreted, against what the weights stand for."""

import pytest
import torch
from torch.nn.functional import linear

from tests.kernels.tensors import random
from tests.parameters import one_in
from trunkline_kernels.gpu.quantized_linear import (
    Fp8Tiling,
    library_fp8_linear,
    library_takes,
    quantize_rows,
    quantized_linear,
)
from trunkline_kernels.gpu.widening import widened
from trunkline_kernels.quantized_weight import dequantize, packed_int4, quantize, unpacked_int4


@pytest.mark.parametrize("inner", [100, 256])
def test_an_8_bit_weight_is_at_most_half_a_step_off(inner: int) -> None:
    weight = random(70, inner)
    error = (dequantize(quantize(weight, "int8")) - weight).abs()
    assert float(error.max()) <= float(weight.abs().max()) / 127 * 0.51


@pytest.mark.parametrize(("inner", "group"), [(256, 128), (576, 64)])
def test_a_4_bit_weight_has_16_values_the_largest_of_which_is_exact(inner: int, group: int) -> None:
    weight = random(70, inner)
    quantized = quantize(weight, "int4")
    assert {*unpacked_int4(quantized).flatten().tolist()} == {*range(16)}
    groups, error = weight.view(-1, group), (dequantize(quantized) - weight).view(-1, group).abs()
    largest = groups.abs().argmax(dim=1, keepdim=True)
    step = groups.gather(1, largest).abs() / 8
    assert torch.all(error.gather(1, largest) <= 1e-6)
    assert torch.all(error <= step * 1.01)  # of those near the largest one's opposite
    assert float((error <= step * 0.51).float().mean()) > 0.98


def test_fp8_keeps_three_bits() -> None:
    weight = random(70, 100)
    found = dequantize(quantize(weight, "fp8"))
    assert torch.all((found - weight).abs() <= weight.abs() / 16 + weight.abs().max() / 448 / 64)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(1, 64), (17, 65), (130, 5), (0, 8)])
@pytest.mark.parametrize(("kind", "inner"), [("int8", 100), ("int8", 128), ("int4", 256), ("int4", 192)])
def test_weight_only_products(kind: str, inner: int, rows: int, columns: int, biased: bool) -> None:
    x, bias = random(rows, inner), random(columns) if biased else None
    weight = quantize(random(columns, inner), kind)
    expected = linear(x, dequantize(weight), bias)
    torch.testing.assert_close(quantized_linear(x, weight, bias), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("rows", "columns", "inner"), [(1, 64, 128), (17, 65, 100)])
def test_fp8_products(rows: int, columns: int, inner: int) -> None:
    x, weight = random(rows, inner), quantize(random(columns, inner), "fp8")
    narrow, scale = quantize_rows(x)
    expected = linear(narrow.float() * scale[:, None], dequantize(weight))
    torch.testing.assert_close(quantized_linear(x, weight), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("rows", [0, 1, 17])
def test_the_librarys_fp8_products_are_those_of_our_own_kernel(rows: int) -> None:
    """On a CPU the library has this product too."""
    x, weight = random(rows, 96), quantize(random(64, 96), "fp8")
    assert library_takes(weight)
    torch.testing.assert_close(library_fp8_linear(x, weight), quantized_linear(x, weight), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("kind", "columns", "inner"), [("fp8", 64, 100), ("fp8", 65, 96), ("int8", 64, 96)])
def test_weights_that_the_library_does_not_take(kind: str, columns: int, inner: int) -> None:
    assert not library_takes(quantize(random(columns, inner), kind))


@pytest.mark.parametrize("tiling", [Fp8Tiling(16, 32, 32, 4, 1), Fp8Tiling(64, 16, 64, 4, 1)])
def test_fp8_products_with_other_tilings(tiling: Fp8Tiling) -> None:
    x, weight = random(33, 100), quantize(random(65, 100), "fp8")
    torch.testing.assert_close(
        quantized_linear(x, weight, tiling=tiling), quantized_linear(x, weight), rtol=1e-4, atol=1e-3
    )


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("inner", "group"), [(256, 128), (192, 64), (192, 96), (128, 32), (320, 320)])
def test_int4_products_of_any_group_and_zero_point(inner: int, group: int, zeros: bool) -> None:
    columns, draw = 70, torch.Generator().manual_seed(inner + group)
    values = torch.randint(0, 16, (columns, inner), generator=draw, dtype=torch.uint8)
    scale = torch.rand(columns, inner // group, generator=draw)
    zero = torch.randint(0, 16, scale.shape, generator=draw, dtype=torch.uint8) if zeros else None
    of_group = [(part.repeat_interleave(group, dim=1) if part is not None else 8.0) for part in (scale, zero)]
    stands_for = (values.float() - of_group[1]) * of_group[0]
    weight, x = packed_int4(values, scale, zero), random(3, inner)
    torch.testing.assert_close(dequantize(weight), stands_for, rtol=0, atol=0)
    torch.testing.assert_close(quantized_linear(x, weight), linear(x, stands_for), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("kind", "inner"), [("int8", 100), ("int8", 2304), ("int4", 192), ("int4", 2304)])
def test_a_widened_weight_has_the_values_that_it_stands_for(kind: str, inner: int) -> None:
    weight = quantize(random(5, inner), kind)
    assert torch.equal(widened(weight, torch.float32), dequantize(weight))


def test_a_widened_weight_has_zero_points() -> None:
    draw = torch.Generator().manual_seed(0)
    values = torch.randint(0, 16, (3, 192), generator=draw, dtype=torch.uint8)
    zero = torch.randint(0, 16, (3, 6), generator=draw, dtype=torch.uint8)
    weight = packed_int4(values, torch.rand(3, 6, generator=draw), zero)
    assert torch.equal(widened(weight, torch.float32), dequantize(weight))


@pytest.mark.parametrize("kind", one_in(3, ["int4", "int8", "fp8"]))
def test_every_tile_of_many_rows_is_computed_once(kind: str) -> None:
    """More tiles of rows than a group has, and a last group that is not full."""
    weight = quantize(random(130, 128), kind)
    x = random(128 * 9 + 1, 128)
    some = torch.tensor([0, 127, 128, 1023, 1024, 1151, 1152])
    torch.testing.assert_close(
        quantized_linear(x, weight)[some], quantized_linear(x[some], weight), rtol=1e-5, atol=1e-4
    )


def test_what_cannot_be_quantised_is_named() -> None:
    with pytest.raises(ValueError, match="int4 weights need an inner dimension that 64 divides, not 100"):
        quantize(random(4, 100), "int4")
    with pytest.raises(ValueError, match="quantisation 'int3' is not one of int8, int4, fp8"):
        quantize(random(4, 100), "int3")
    with pytest.raises(ValueError, match="not 96 in 3 groups"):
        packed_int4(torch.zeros(4, 96, dtype=torch.uint8), random(4, 3))
