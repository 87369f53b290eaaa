"""A matrix product whose bits do not depend on the number of rows, for --deterministic.

Libraries choose whether to split the inner dimension by shape. Here every product of a row and a weight sums over the
inner dimension in one order, 64 elements at a time. Source: He et al., "Defeating Nondeterminism in LLM Inference"
(Thinking Machines, 2025). Reference: torch.nn.functional.linear.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from trunkline_kernels.gpu.matmul_tiling import MatmulTiling
from trunkline_kernels.gpu.tile_order import GROUP_ROWS, tile_at

TILING = MatmulTiling(64, 128, 64, 4, 3)
# From large to small. All of them give a row the same bits in bfloat16 on compute capability 9.0, as the stage "fixed
# products" of `make bench-gpu` shows; on other devices and in other types that has not been compared.
TILINGS = (
    MatmulTiling(128, 256, 64, 8, 3), MatmulTiling(128, 128, 64, 8, 4), TILING, MatmulTiling(64, 64, 64, 4, 4),
    MatmulTiling(64, 32, 64, 4, 6), MatmulTiling(64, 16, 64, 4, 6),
)  # fmt: skip
COMPARED_CAPABILITY = (9, 0)
ENOUGH_TILES = 256  # about two for each multiprocessor of an H100 or H200
FEWEST_LARGE_ROWS = 256  # of a product whose tiles may have more than 64 rows


def fixed_tilings(capability: tuple[int, int], *, is_nvidia: bool, dtype: torch.dtype) -> tuple[MatmulTiling, ...]:
    """Returns the tilings that give a row the same bits on a device, from large to small.

    dtype: of activations and weights
    """
    compared = is_nvidia and capability == COMPARED_CAPABILITY and dtype == torch.bfloat16
    return TILINGS if compared else (TILING,)


def tiling_of(tilings: Sequence[MatmulTiling], rows: int, columns: int) -> MatmulTiling:
    """Returns the largest tiling that makes enough tiles of a product, else the smallest. It changes only at numbers of
    rows that are powers of two, so that the warm-up compiles all that are used."""
    rows = 1 << max(0, rows.bit_length() - 1)
    for tiling in tilings:
        if tiling.rows > TILING.rows and rows < FEWEST_LARGE_ROWS:
            continue
        if triton.cdiv(rows, tiling.rows) * triton.cdiv(columns, tiling.columns) >= ENOUGH_TILES:
            return tiling
    return tilings[-1]


@triton.jit(do_not_specialize=["num_rows"])
def _fixed_matmul(
    x,  # [num_rows, INNER]
    weight,  # [num_columns, INNER]
    bias,  # [num_columns]; not read unless BIAS
    out,  # [num_rows, num_columns]
    num_rows,
    num_columns,
    INNER: tl.constexpr,
    BIAS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_INNER: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
):  # fmt: skip
    """Grid: (row tiles * column tiles), in the order of tile_at()."""
    row_tiles = tl.cdiv(num_rows, TILE_ROWS)
    column_tiles = tl.cdiv(num_columns, TILE_COLUMNS)
    row_tile, column_tile = tile_at(tl.program_id(0), row_tiles, column_tiles, GROUP_ROWS)
    row = (row_tile * TILE_ROWS + tl.arange(0, TILE_ROWS)).to(tl.int64)
    column = (column_tile * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)).to(tl.int64)
    inner = tl.arange(0, TILE_INNER)
    acc = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    for start in tl.range(0, INNER, TILE_INNER):
        known = start + inner < INNER
        left = tl.load(
            x + row[:, None] * INNER + start + inner[None, :],
            mask=(row < num_rows)[:, None] & known[None, :],
            other=0.0,
        )
        right = tl.load(
            weight + column[None, :] * INNER + start + inner[:, None],
            mask=(column < num_columns)[None, :] & known[:, None],
            other=0.0,
        )
        acc = tl.dot(left, right, acc, input_precision="ieee")
    if BIAS:
        acc += tl.load(bias + column, mask=column < num_columns, other=0.0).to(tl.float32)[None, :]
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    tl.store(out + row[:, None] * num_columns + column[None, :], acc.to(out.dtype.element_ty), mask=inside)


def fixed_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, dtype: torch.dtype | None = None,
    tilings: Sequence[MatmulTiling] = (TILING,),
) -> Tensor:  # fmt: skip
    """Computes x @ weight.T + bias, accumulated in float32.

    x: [num_rows, inner] contiguous, weight: [num_columns, inner] contiguous, bias: [num_columns]
    tilings: of fixed_tilings(); measurements try others, and bits may depend on them
    → [num_rows, num_columns] in `dtype`; None: x's
    """
    rows, inner = x.shape
    columns = weight.shape[0]
    out = x.new_empty(rows, columns, dtype=dtype or x.dtype)
    if rows:
        tiling = tiling_of(tilings, rows, columns)
        tiles = triton.cdiv(rows, tiling.rows) * triton.cdiv(columns, tiling.columns)
        _fixed_matmul[(tiles,)](
            x, weight, x if bias is None else bias, out, rows, columns, inner, bias is not None,
            tiling.rows, tiling.columns, tiling.inner, GROUP_ROWS, num_warps=tiling.warps,
            num_stages=tiling.stages if x.dtype.itemsize == 2 else 1,
        )  # fmt: skip
    return out
