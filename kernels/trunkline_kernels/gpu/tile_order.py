"""The order in which programs compute the tiles of a matrix product."""

import triton
import triton.language as tl

GROUP_ROWS = 8  # row tiles that use the same tile of the weight while it is in the L2 cache


@triton.jit
def tile_at(program, row_tiles, column_tiles, GROUP_ROWS: tl.constexpr):
    """→ row tile, column tile of a program in a grid of row_tiles * column_tiles.

    GROUP_ROWS row tiles use one tile of the weight before the next one, so that long prompts read a weight from memory
    once per group of row tiles instead of once per row tile.
    """
    first = program // (GROUP_ROWS * column_tiles) * GROUP_ROWS
    height = tl.minimum(row_tiles - first, GROUP_ROWS)
    within = program % (GROUP_ROWS * column_tiles)
    return first + within % height, within // height
