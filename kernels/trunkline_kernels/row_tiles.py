"""Runs a token-wise function on tiles with a fixed number of rows, for --deterministic.

Matrix products choose their blocking, and element-wise loops their vector tails and thread splits, by shape. A fixed
shape means a fixed choice, so a row's result does not depend on the number of other rows.
"""

from collections.abc import Callable

import torch
from torch import Tensor

ROW_TILE = 16


def map_row_tiles(function: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
    """Applies `function` to tiles of ROW_TILE rows, the last one padded with zeros, and joins the results.

    inputs: each [num_rows, ...] → each [num_rows, ...]
    """
    num_rows = inputs[0].shape[0]
    parts = []
    for start in range(0, num_rows, ROW_TILE):
        tile = [_padded(x[start : start + ROW_TILE]) for x in inputs]
        kept = min(ROW_TILE, num_rows - start)
        parts.append([y[:kept] for y in function(*tile)])
    return tuple(torch.cat(pieces) for pieces in zip(*parts, strict=True))


def _padded(x: Tensor) -> Tensor:
    """Returns x padded to a full tile in new memory, because a loop's tail also depends on alignment."""
    tile = x.new_zeros(ROW_TILE, *x.shape[1:])
    tile[: x.shape[0]] = x
    return tile
