"""The first half of a SwiGLU feed-forward layer as one kernel: both products and the gate.

Against a library's product and silu_and_mul, the products' results are neither written nor read again, and a launch is
saved; but the library's product may be the faster one. The product sweep of `make bench-gpu` says which it is on a
device: no engine uses this kernel until it has won somewhere.

Twin: silu_and_mul(linear(x, weight)) of trunkline_kernels and torch. Source: Shazeer (2020).
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

GROUP_ROWS = 8  # tiles of rows that share a tile of the weight while it is in cache


@dataclass(frozen=True, slots=True)
class GatedTiling:
    """A tile of rows and columns (of gate and of up, each), how much of the inner dimension at a time, warps, and
    stages of the pipeline of loads."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int


@triton.jit(do_not_specialize=["num_rows"])
def _gated_matmul(
    x,  # [num_rows, INNER]
    weight,  # [2 * num_columns, INNER], gate first
    out,  # [num_rows, num_columns]
    num_rows,
    num_columns,
    INNER: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_INNER: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
):  # fmt: skip
    """Grid: (row tiles * column tiles), GROUP_ROWS tiles of rows together."""
    row_tiles = tl.cdiv(num_rows, TILE_ROWS)
    column_tiles = tl.cdiv(num_columns, TILE_COLUMNS)
    program = tl.program_id(0)
    first = program // (GROUP_ROWS * column_tiles) * GROUP_ROWS
    height = tl.minimum(row_tiles - first, GROUP_ROWS)
    within = program % (GROUP_ROWS * column_tiles)
    row = ((first + within % height) * TILE_ROWS + tl.arange(0, TILE_ROWS)).to(tl.int64)
    column = ((within // height) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)).to(tl.int64)
    inner = tl.arange(0, TILE_INNER)
    some_rows, some_columns = (row < num_rows)[:, None], (column < num_columns)[None, :]
    gate = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    up = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    left_place = x + row[:, None] * INNER + inner[None, :]
    right_place = weight + column[None, :] * INNER + inner[:, None]
    up_offset = tl.full([], INNER, tl.int64) * num_columns
    for start in tl.range(0, INNER, TILE_INNER):
        known = start + inner < INNER
        left = tl.load(left_place + start, mask=some_rows & known[None, :], other=0.0)
        of_gate = tl.load(right_place + start, mask=some_columns & known[:, None], other=0.0)
        of_up = tl.load(right_place + start + up_offset, mask=some_columns & known[:, None], other=0.0)
        gate = tl.dot(left, of_gate, gate, input_precision="ieee")
        up = tl.dot(left, of_up, up, input_precision="ieee")
    # Rounded where two kernels would round.
    dtype: tl.constexpr = out.dtype.element_ty
    gate = gate.to(dtype).to(tl.float32)
    activated = (gate / (1 + tl.exp(-gate))).to(dtype)
    tl.store(
        out + row[:, None] * num_columns + column[None, :], activated * up.to(dtype), mask=some_rows & some_columns
    )


def gated_linear(x: Tensor, weight: Tensor, tiling: GatedTiling) -> Tensor:
    """silu(x @ gate.T) * (x @ up.T), accumulated in float32.

    x: [num_rows, inner] contiguous, weight: [2 * num_columns, inner] contiguous, gate first
    → [num_rows, num_columns] in x's dtype
    """
    rows, inner = x.shape
    columns = len(weight) // 2
    out = x.new_empty(rows, columns)
    if rows:
        _gated_matmul[(triton.cdiv(rows, tiling.rows) * triton.cdiv(columns, tiling.columns),)](
            x, weight, out, rows, columns, inner, tiling.rows, tiling.columns, tiling.inner, GROUP_ROWS,
            num_warps=tiling.warps, num_stages=tiling.stages,
        )  # fmt: skip
    return out
