"""Running a token-wise function on tiles of one fixed number of rows, for --deterministic.

Matrix products choose their blocking, and element-wise loops their vector tails and thread splits, by shape. With one
shape there is one choice, so what a row becomes does not depend on how many others are there.
"""

from collections.abc import Callable

import torch
from torch import Tensor

ROW_TILE = 16


def map_row_tiles(function: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
    """Applies `function` to tiles of ROW_TILE rows, the last one padded with zeros, and joins what it returns.

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
    """A tile of its own memory: alignment is part of what a loop's tail depends on."""
    tile = x.new_zeros(ROW_TILE, *x.shape[1:])
    tile[: x.shape[0]] = x
    return tile
