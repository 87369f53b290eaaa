"""Parts of one product: those of one form become one weight, others are held apart."""

import pytest
import torch
from torch import Tensor

from trunkline_kernels.quantized_weight import QuantizedWeight, packed_int4, quantize, quantize_blocks
from trunkline_worker.model.weights import joined, parts_of, stored_part, whole_product

INNER = 256


def weight(kind: str, rows: int) -> Tensor | QuantizedWeight:
    values = torch.randn(rows, INNER, generator=torch.Generator().manual_seed(rows))
    if kind == "plain":
        return values
    if kind == "blocks":
        return quantize_blocks(values)
    if kind == "zeros":
        zeros = torch.full((rows, 2), 3, dtype=torch.uint8)
        return packed_int4(torch.full((rows, INNER), 7, dtype=torch.uint8), torch.ones(rows, 2), zeros)
    return quantize(values, kind)


@pytest.mark.parametrize(
    ("parts", "count"),
    [
        ("plain:8 plain:16", 1),
        ("int8:8 int8:16 int8:8", 1),
        ("fp8:8 fp8:16", 1),
        ("int4:8 int4:16", 1),
        ("zeros:8 zeros:16", 1),
        ("int4:8 zeros:16", 2),
        ("int4:8 int4:8 int8:16", 2),
        ("int4:8 plain:16 int4:8", 3),
        ("blocks:128 blocks:256", 1),
        ("blocks:128 fp8:128", 2),
        ("blocks:128 blocks:100", 2),
        ("blocks:100 blocks:128", 2),
    ],
)
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_product_is_that_of_its_parts(parts: str, count: int, has_bias: bool) -> None:
    sizes = [(kind, int(rows)) for kind, rows in (part.split(":") for part in parts.split())]
    given = [stored_part(weight(*size), torch.randn(size[1]) if has_bias else None) for size in sizes]
    product = joined(given)
    assert len(parts_of(product)) == count
    x = torch.randn(3, INNER)
    expected = torch.cat([part.multiply(x) for part in given], dim=1)
    torch.testing.assert_close(product.multiply(x), expected)
    torch.testing.assert_close(whole_product(product, torch.float32).multiply(x), expected)
