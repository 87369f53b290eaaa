"""Tiles of rows, for --deterministic without the C kernels: a row's place and the other rows do not count."""

from functools import partial
from itertools import product

import pytest
import torch
from torch.nn.functional import linear, silu

from trunkline_kernels.row_tiles import map_row_tiles, tile_rows

WIDTHS = (1, 2, 5, 7, 8, 9, 13, 16, 24, 31, 40, 64, 101, 172, 300)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_a_row_do_not_depend_on_its_place_for_any_widths(dtype: torch.dtype, has_bias: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    for width, out in product(WIDTHS, WIDTHS):
        weight = torch.randn(out, width, generator=draw).to(dtype)
        bias = torch.randn(out, generator=draw).to(dtype) if has_bias else None
        x = torch.randn(16, width, generator=draw).to(dtype)
        compute = partial(map_row_tiles, partial(_activated, weight, bias), tile_rows([(weight, bias)]))
        alone = torch.cat([compute(row)[0] for row in x[:, None]])
        for places in (1, 5, 15):
            assert torch.equal(compute(x.roll(places, 0))[0].roll(-places, 0), alone), (width, out)


def _activated(weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor) -> tuple[torch.Tensor]:
    return (silu(linear(x, weight, bias)),)
