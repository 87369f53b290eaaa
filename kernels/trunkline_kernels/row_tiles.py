"""Runs a token-wise function on tiles with a fixed number of rows, for --deterministic without the C kernels.

Matrix products choose their blocking, and element-wise loops their vector tails and thread splits, by shape. A fixed
shape means a fixed choice, so a row's result does not depend on the number of other rows. It may still depend on the
row's place in the tile: for some shapes a library computes the first rows with another kernel than the last ones.
tile_rows() finds such shapes. A vector tail has other bits, too, so tiles have no tail: the number of their rows is a
multiple of what PyTorch's loops compute at a time.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn.functional import linear

ROW_TILE = 32  # two vectors of 512 bits of float32
NUM_PROBES = 8  # rows with other values, because two orders of summation may agree on some of them


def tile_rows(products: Iterable[tuple[Tensor, Tensor | None]]) -> int:
    """Returns how many rows a tile may have, so that these products give equal rows equal bits: ROW_TILE, or 1 if one
    of them depends on a row's place.

    products: weights [out, in] and biases [out], as for linear()
    """
    return ROW_TILE if all(_keeps_equal_rows(*product) for product in products) else 1


def _keeps_equal_rows(weight: Tensor, bias: Tensor | None) -> bool:
    draw = torch.Generator().manual_seed(0)
    probes = torch.randn(NUM_PROBES, 1, weight.shape[1], generator=draw).to(weight)
    results = (linear(probe.expand(ROW_TILE, -1).contiguous(), weight, bias) for probe in probes)
    return all(torch.equal(result, result[:1].expand_as(result)) for result in results)


def map_row_tiles(function: Callable[..., tuple[Tensor, ...]], rows: int, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Applies `function` to tiles of `rows` rows, the last one padded with zeros, and joins the results.

    inputs: each [num_rows, ...] → each [num_rows, ...]
    """
    num_rows = inputs[0].shape[0]
    parts = []
    for start in range(0, num_rows, rows):
        tile = [_padded(x[start : start + rows], rows) for x in inputs]
        kept = min(rows, num_rows - start)
        parts.append([y[:kept] for y in function(*tile)])
    return tuple(torch.cat(pieces) for pieces in zip(*parts, strict=True))


def _padded(x: Tensor, rows: int) -> Tensor:
    """Returns x padded to a full tile in new memory, because a loop's tail also depends on alignment."""
    tile = x.new_zeros(rows, *x.shape[1:])
    tile[: x.shape[0]] = x
    return tile
