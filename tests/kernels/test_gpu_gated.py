"""Both products and the gate of a feed-forward layer in one kernel, interpreted, against two."""

import pytest
import torch
from torch.nn.functional import linear

from trunkline_kernels.gpu.gated_linear import GatedTiling, gated_linear
from trunkline_kernels.silu_and_mul import silu_and_mul


@pytest.mark.parametrize("tiling", [GatedTiling(16, 16, 16, 4, 1), GatedTiling(32, 64, 32, 4, 1)])
@pytest.mark.parametrize(("rows", "columns", "inner"), [(1, 16, 16), (5, 24, 40), (33, 70, 64), (300, 16, 32)])
def test_gated_products_equal_products_and_gate(rows: int, columns: int, inner: int, tiling: GatedTiling) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, inner, generator=generator) / inner**0.25 for size in (rows, 2 * columns))
    torch.testing.assert_close(gated_linear(x, weight, tiling), silu_and_mul(linear(x, weight)))


def test_results_are_rounded_where_two_kernels_round() -> None:
    generator = torch.Generator().manual_seed(1)
    # Products of small integers are exact in 16 bits, so that only the gate's own rounding is left.
    x, weight = (torch.randint(-2, 3, (size, 32), generator=generator).half() for size in (9, 40))
    found = gated_linear(x, weight, GatedTiling(16, 16, 16, 4, 1))
    torch.testing.assert_close(found, silu_and_mul(linear(x, weight)), rtol=2e-3, atol=1e-6)


def test_no_rows_are_no_launch() -> None:
    assert gated_linear(torch.empty(0, 16), torch.empty(32, 16), GatedTiling(16, 16, 16, 4, 1)).shape == (0, 16)
