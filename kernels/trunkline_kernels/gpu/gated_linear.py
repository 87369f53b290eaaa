"""The first half of a SwiGLU feed-forward layer as one kernel: both products and the gate.

Compared with a library's product followed by silu_and_mul, the products' results are not written and read again, there
is one launch less, and the first weights are prefetched before the activations are ready. The library's product may
still be faster: product_choice decides by the number of rows.

Reference: silu_and_mul(linear(x, weight)) of trunkline_kernels and torch. Source: Shazeer (2020).
"""

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from trunkline_kernels.gpu.dependent_launch import ask_for, launch_options, wait_for_inputs
from trunkline_kernels.gpu.matmul_tiling import MatmulTiling
from trunkline_kernels.gpu.tile_order import GROUP_ROWS, tile_at

AHEAD = 8  # cache lines of each row of the weight that are prefetched before the activations are ready
LINE = 128  # bytes


@dataclass(frozen=True, slots=True)
class GatedTiling(MatmulTiling):
    """The tiling of gated_linear. A tile has this many columns of gate, and as many of up."""


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
    AHEAD: tl.constexpr,
    LINE: tl.constexpr,  # elements
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: (row tiles * column tiles), in the order of tile_at().

    Columns of gate and up alternate in the tile that is multiplied, so that one thread has both results of a pair.
    """
    row_tiles = tl.cdiv(num_rows, TILE_ROWS)
    column_tiles = tl.cdiv(num_columns, TILE_COLUMNS)
    row_tile, column_tile = tile_at(tl.program_id(0), row_tiles, column_tiles, GROUP_ROWS)
    first_row, first_column = row_tile * TILE_ROWS, column_tile * TILE_COLUMNS
    turn = tl.arange(0, 2 * TILE_COLUMNS)
    # Past the edge, the last row or column is computed again and not stored, so that loads need no mask.
    of_gate = tl.minimum(first_column + turn // 2, num_columns - 1).to(tl.int64)
    right_row = weight + (of_gate + (turn % 2).to(tl.int64) * num_columns) * INNER
    if DEPENDENT:
        # No earlier kernel writes weights, so they can be prefetched before the wait.
        for line in tl.static_range(AHEAD):
            if line * LINE < INNER:
                ask_for(right_row + line * LINE)
    wait_for_inputs(DEPENDENT)

    row = first_row + tl.arange(0, TILE_ROWS)
    inner = tl.arange(0, TILE_INNER)
    left_place = x + tl.minimum(row, num_rows - 1).to(tl.int64)[:, None] * INNER + inner[None, :]
    right_place = right_row[None, :] + inner[:, None]
    acc = tl.zeros([TILE_ROWS, 2 * TILE_COLUMNS], tl.float32)
    for start in tl.range(0, INNER, TILE_INNER):
        if INNER % TILE_INNER == 0:
            left = tl.load(left_place + start)
            right = tl.load(right_place + start)
        else:
            known = start + inner < INNER
            left = tl.load(left_place + start, mask=known[None, :], other=0.0)
            right = tl.load(right_place + start, mask=known[:, None], other=0.0)
        acc = tl.dot(left, right, acc, input_precision="ieee")
    gate, up = tl.split(tl.reshape(acc, [TILE_ROWS, TILE_COLUMNS, 2]))
    # Rounded where two separate kernels would round.
    dtype: tl.constexpr = out.dtype.element_ty
    gate = gate.to(dtype).to(tl.float32)
    activated = (gate / (1 + tl.exp(-gate))).to(dtype)
    column = first_column + tl.arange(0, TILE_COLUMNS)
    place = out + row.to(tl.int64)[:, None] * num_columns + column[None, :]
    tl.store(place, activated * up.to(dtype), mask=(row < num_rows)[:, None] & (column < num_columns)[None, :])


def gated_linear(x: Tensor, weight: Tensor, tiling: GatedTiling, *, dependent: bool = False) -> Tensor:
    """Computes silu(x @ gate.T) * (x @ up.T), accumulated in float32.

    x: [num_rows, inner] contiguous, weight: [2 * num_columns, inner] contiguous, gate first
    dependent: see dependent_launch
    → [num_rows, num_columns] in x's dtype
    """
    rows, inner = x.shape
    columns = len(weight) // 2
    out = x.new_empty(rows, columns)
    if rows:
        _gated_matmul[(triton.cdiv(rows, tiling.rows) * triton.cdiv(columns, tiling.columns),)](
            x, weight, out, rows, columns, inner, tiling.rows, tiling.columns, tiling.inner, GROUP_ROWS, AHEAD,
            LINE // x.itemsize, dependent, num_warps=tiling.warps, num_stages=tiling.stages,
            **launch_options(dependent),
        )  # fmt: skip
    return out
