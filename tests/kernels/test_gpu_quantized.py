"""Products with quantised weights, interpreted, against what the weights stand for."""

import pytest
import torch
from torch.nn.functional import linear

from tests.kernels.tensors import random
from trunkline_kernels.gpu.quantized_linear import dequantize, quantize, quantize_rows, quantized_linear


@pytest.mark.parametrize(("kind", "inner", "bits"), [("int8", 100, 7), ("int8", 256, 7), ("int4", 256, 3)])
def test_a_weight_is_at_most_half_a_step_off(kind: str, inner: int, bits: int) -> None:
    weight = random(70, inner)
    error = (dequantize(quantize(weight, kind)) - weight).abs()
    assert float(error.max()) <= float(weight.abs().max()) / (2**bits - 1) * 0.51


def test_fp8_keeps_three_bits() -> None:
    weight = random(70, 100)
    found = dequantize(quantize(weight, "fp8"))
    assert torch.all((found - weight).abs() <= weight.abs() / 16 + weight.abs().max() / 448 / 64)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(1, 64), (17, 65), (130, 5), (0, 8)])
@pytest.mark.parametrize(("kind", "inner"), [("int8", 100), ("int8", 128), ("int4", 256)])
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


def test_what_cannot_be_quantised_is_named() -> None:
    with pytest.raises(ValueError, match="int4 weights need an inner dimension that 128 divides, not 100"):
        quantize(random(4, 100), "int4")
    with pytest.raises(ValueError, match="quantisation 'int3' is not one of int8, int4, fp8"):
        quantize(random(4, 100), "int3")
