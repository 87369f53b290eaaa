"""Products of many rows with int8 and int4 weights go through the library, with the same result."""

import pytest
import torch
from torch.nn.functional import linear

from tests.kernels.tensors import random
from trunkline_kernels.gpu import quantized_linear
from trunkline_kernels.gpu.persistent_linear import ProductRoom
from trunkline_kernels.gpu.product_choice import ProductChoice
from trunkline_kernels.quantized_weight import dequantize, quantize
from trunkline_worker.model.gpu_weight import WIDENED_ROWS, GpuWeight

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize(("rows", "own"), [(WIDENED_ROWS - 1, True), (WIDENED_ROWS, False)])
def test_many_rows_go_through_the_library(kind: str, rows: int, own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, bias, x = quantize(random(24, 128), kind), random(24), random(rows, 128)
    room = ProductRoom.allocate([], multiprocessors=1, device=CPU)
    product = GpuWeight(weight, bias, ProductChoice(), room, (), False)
    torch.testing.assert_close(product.multiply(x), linear(x, dequantize(weight), bias), rtol=1e-4, atol=1e-3)
    monkeypatch.setattr(quantized_linear, "_weight_only", None)  # our own kernel is missing
    if own:
        with pytest.raises(TypeError):
            product.multiply(x)
    else:
        product.multiply(x)


def test_only_weights_that_are_widened_take_room_for_it() -> None:
    room = ProductRoom.allocate([], multiprocessors=1, device=CPU)
    values = random(24, 128)
    sizes = [
        GpuWeight(weight, None, ProductChoice(), room, (), False).widened_elements
        for weight in (values, quantize(values, "fp8"), quantize(values, "int8"), quantize(values, "int4"))
    ]
    assert sizes == [0, 0, 24 * 128, 24 * 128]
