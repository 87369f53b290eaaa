"""Products of 8-bit floats with persistent programs, which stay on their multiprocessors and divide the work evenly.

A product of few rows has few tiles: 192 tiles are 1.45 waves on 132 multiprocessors, and take as long as 2. Here each
program computes the same number of whole tiles. The remaining tiles are split along the inner dimension, so that every
program gets an equal share of them. The last program to finish its share of a tile adds up the shares, always in the
same order, so that results do not depend on which program is last.

Tiles are loaded through tensor descriptors: the device's copy engine fetches them without the threads' help (TMA), from
compute capability 9.0 on. The launcher passes the descriptors by value, so a launch needs no memory for them, and a
captured graph keeps them.

Reference: quantized_linear(), and silu_and_mul() of it. Source: Osama et al., "Stream-K: Work-centric
Parallel Decomposition for Dense Matrix-Matrix Multiplication on the GPU" (2023), the variant with whole tiles first.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from trunkline_kernels.gpu.dependent_launch import ask_for, launch_options, wait_for_inputs
from trunkline_kernels.gpu.matmul_tiling import MatmulTiling
from trunkline_kernels.gpu.quantized_linear import quantize_groups, quantize_rows
from trunkline_kernels.gpu.tile_order import GROUP_ROWS, tile_at
from trunkline_kernels.quantized_weight import QuantizedWeight

OLDEST_CAPABILITY = (9, 0)
ROW_ALIGNMENT = 16  # bytes: a descriptor's rows are a multiple of it
AHEAD = 4  # cache lines of each row of the weight that are prefetched before the activations are ready
LINE = 128  # bytes, and elements
# Tiles are split only if that saves this many steps of the inner loop: adding up costs some microseconds, a step 0.5.
LEAST_SAVED = 8
NEVER = 1 << 16  # steps that no product has
FEWEST_STEPS = 4  # of a program's share
MERGED_COLUMNS = 32  # columns that are added up at a time


@dataclass(frozen=True, slots=True)
class PersistentTiling(MatmulTiling):
    """The tiling of a persistent product. If it is gated, a tile has this many columns of gate, and as many of up.

    If memory bandwidth is the limit, fewer programs with whole tiles may be as fast as split tiles.
    """

    programs: int  # at once on a multiprocessor
    least_saved: int = LEAST_SAVED  # tiles are split only if that saves this many steps of the inner loop


@dataclass(frozen=True, slots=True)
class Division:
    """How programs divide the tiles of a product."""

    programs: int
    waves: int  # whole tiles of each program
    sharing: int  # programs that divide the remaining tiles; 0: none remain


def is_offered(capability: tuple[int, int], *, is_nvidia: bool) -> bool:
    """Whether the device has the copy engine. Without it, the kernels compute the same results slowly."""
    return is_nvidia and capability >= OLDEST_CAPABILITY


def division_of(*, tiles: int, steps: int, programs: int, least_saved: int = LEAST_SAVED) -> Division:
    """Divides the tiles of a product among programs.

    steps: of a tile's inner loop; programs: most that run at once; least_saved: see PersistentTiling
    """
    waves, rest = divmod(tiles, programs)
    if not rest:
        return Division(programs, waves, 0)
    sharing = max(rest, min(programs, rest * steps // FEWEST_STEPS))
    if steps - -(-rest * steps // sharing) < least_saved:
        sharing = rest
    return Division(programs if waves else sharing, waves, sharing)


@dataclass(frozen=True, slots=True)
class ProductRoom:
    """Memory for the programs that share a tile. Products that run one after another can use the same."""

    shares: Tensor  # [num_values] float32: each program's sums for its first and its second split tile
    arrivals: Tensor  # [num_programs] int32: finished shares of each split tile; zero before and after a product
    multiprocessors: int

    @classmethod
    def allocate(
        cls, tilings: Iterable[PersistentTiling], *, multiprocessors: int, device: torch.device
    ) -> "ProductRoom":
        """Allocates room for any product with these tilings."""
        known = list(tilings)
        sizes = [2 * multiprocessors * each.programs * 2 * each.rows * each.columns for each in known]
        return cls(
            torch.empty(max(sizes, default=0), dtype=torch.float32, device=device),
            torch.zeros(
                multiprocessors * max((each.programs for each in known), default=0), dtype=torch.int32, device=device
            ),
            multiprocessors,
        )


@triton.jit
def _finish(
    acc, up, out, row_factors, column_factors, row, column, num_rows, num_columns, GATED: tl.constexpr,
    ADDED: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Stores a part of the result. acc, up: [rows, columns] float32; up is not read unless GATED"""
    if not BLOCKS:
        of_rows = tl.load(row_factors + row, mask=row < num_rows, other=0.0)[:, None]
        acc = acc * of_rows * tl.load(column_factors + column, mask=column < num_columns, other=0.0)[None, :]
        if GATED:
            of_columns = tl.load(column_factors + num_columns + column, mask=column < num_columns, other=0.0)
            up = up * of_rows * of_columns[None, :]
    dtype: tl.constexpr = out.dtype.element_ty
    place = out + row.to(tl.int64)[:, None] * num_columns + column[None, :]
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    if GATED:
        # Rounded where two separate kernels would round.
        gate = acc.to(dtype).to(tl.float32)
        tl.store(place, (gate / (1 + tl.exp(-gate))).to(dtype) * up.to(dtype), mask=inside)
    elif ADDED:
        tl.store(place, (acc + tl.load(place, mask=inside, other=0.0).to(tl.float32)).to(dtype), mask=inside)
    else:
        tl.store(place, acc.to(dtype), mask=inside)


@triton.jit
def _first_step(program, cut_steps, sharing):
    """Returns the first step of a program's share. The steps of all split tiles are numbered consecutively."""
    return cut_steps * tl.minimum(program, sharing) // sharing


@triton.jit
def _program_of(step, cut_steps, sharing):
    """Returns the program whose share contains a step."""
    return ((step + 1) * sharing - 1) // cut_steps


@triton.jit(do_not_specialize=["num_rows", "waves", "sharing"])
def _persistent_matmul(
    x,  # descriptor of [num_rows, inner] fp8, by [TILE_ROWS, TILE_INNER]
    weight,  # descriptor of [num_columns, inner] fp8, twice as many columns if GATED, by [TILE_COLUMNS, TILE_INNER]
    weight_rows,  # the same weight as a pointer
    # The scales of x and weight: [num_rows], [num_columns] float32. BLOCKS: [inner / TILE_INNER, num_rows] and
    # [num_columns / TILE_INNER, inner / TILE_INNER]
    row_factors, column_factors,
    out,  # [num_rows, num_columns] ←; the product is added to it if ADDED
    shares, arrivals,  # of ProductRoom
    num_rows,
    num_columns,
    inner,
    waves, sharing,  # of Division
    GATED: tl.constexpr,
    ADDED: tl.constexpr,
    BLOCKS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_INNER: tl.constexpr,
    MERGED_COLUMNS: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    AHEAD: tl.constexpr,
    LINE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: (programs of Division). Tiles are numbered in the order of tile_at().

    BLOCKS: the weight has a scale per block of TILE_INNER x TILE_INNER. TILE_COLUMNS divides TILE_INNER, and if GATED,
    TILE_INNER divides num_columns.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    row_tiles, column_tiles = tl.cdiv(num_rows, TILE_ROWS), tl.cdiv(num_columns, TILE_COLUMNS)
    steps = tl.cdiv(inner, TILE_INNER)
    first_cut = waves * programs
    cut_steps = (row_tiles * column_tiles - first_cut) * steps
    divisor = tl.maximum(sharing, 1)
    begin, end = _first_step(program, cut_steps, divisor), _first_step(program + 1, cut_steps, divisor)
    # A share is at most as long as a tile, so it belongs to one split tile, or to two.
    items = waves + (end > begin).to(tl.int32) + (begin // steps < (end - 1) // steps).to(tl.int32)
    if DEPENDENT:
        # No earlier kernel writes weights, so they can be prefetched before the wait.
        tile = tl.where(waves > 0, program, first_cut + begin // steps)
        _, column_tile = tile_at(tile, row_tiles, column_tiles, GROUP_ROWS)
        ahead = tl.minimum(column_tile * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS), num_columns - 1).to(tl.int64)
        place = weight_rows + ahead * inner + tl.where(waves > 0, 0, begin % steps * TILE_INNER)
        for line in tl.static_range(AHEAD):
            ask_for(place + line * LINE)
            if GATED:
                ask_for(place + num_columns.to(tl.int64) * inner + line * LINE)
    wait_for_inputs(DEPENDENT)

    row_of_tile, column_of_tile = tl.arange(0, TILE_ROWS), tl.arange(0, TILE_COLUMNS)
    for item in tl.range(0, items):
        at = tl.where(item == waves, begin, (begin // steps + 1) * steps)  # of a split tile: where the share begins
        tile = tl.where(item < waves, item * programs + program, first_cut + at // steps)
        first = tl.where(item < waves, 0, at % steps)
        last = tl.where(item < waves, steps, tl.minimum(end - at + first, steps))
        row_tile, column_tile = tile_at(tile, row_tiles, column_tiles, GROUP_ROWS)
        first_row, first_column = row_tile * TILE_ROWS, column_tile * TILE_COLUMNS
        row = first_row + row_of_tile
        acc = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
        up = acc
        for step in tl.range(first, last):
            left = x.load([first_row, step * TILE_INNER])
            right = weight.load([first_column, step * TILE_INNER])
            if BLOCKS:
                of_rows = tl.load(row_factors + step * num_rows + row, mask=row < num_rows, other=0.0)
                block = column_factors + first_column // TILE_INNER * steps + step
                acc += tl.dot(left, right.T) * (of_rows * tl.load(block))[:, None]
                if GATED:
                    right = weight.load([num_columns + first_column, step * TILE_INNER])
                    block += num_columns // TILE_INNER * steps
                    up += tl.dot(left, right.T) * (of_rows * tl.load(block))[:, None]
            else:
                # Hopper's 8-bit products keep 14 bits of their sums, so each tile's sum is added in full precision.
                acc = tl.dot(left, right.T, acc, max_num_imprecise_acc=TILE_INNER)
                if GATED:
                    right = weight.load([num_columns + first_column, step * TILE_INNER])
                    up = tl.dot(left, right.T, up, max_num_imprecise_acc=TILE_INNER)
        if last - first == steps:
            column = first_column + column_of_tile
            _finish(acc, up, out, row_factors, column_factors, row, column, num_rows, num_columns, GATED, ADDED, BLOCKS)
        else:
            SLOT: tl.constexpr = TILE_ROWS * TILE_COLUMNS * (2 if GATED else 1)
            UP: tl.constexpr = TILE_ROWS * TILE_COLUMNS
            cut = tile - first_cut
            in_tile = row_of_tile[:, None] * TILE_COLUMNS
            slot = shares + (2 * program + (begin // steps < cut).to(tl.int32)).to(tl.int64) * SLOT
            some_rows = (row < num_rows)[:, None]
            tl.store(slot + in_tile + column_of_tile[None, :], acc, mask=some_rows)
            if GATED:
                tl.store(slot + UP + in_tile + column_of_tile[None, :], up, mask=some_rows)
            # All threads store before one of them counts the share, so that the last program sees every share.
            tl.debug_barrier()
            first_program = _program_of(cut * steps, cut_steps, sharing)
            last_program = _program_of(cut * steps + steps - 1, cut_steps, sharing)
            if tl.atomic_add(arrivals + cut, 1, sem="acq_rel") == last_program - first_program:
                tl.store(arrivals + cut, 0)  # for the next product
                for merged in tl.range(0, TILE_COLUMNS, MERGED_COLUMNS):
                    in_columns = merged + tl.arange(0, MERGED_COLUMNS)
                    total = tl.zeros([TILE_ROWS, MERGED_COLUMNS], tl.float32)
                    total_up = total
                    for one in tl.range(first_program, last_program + 1):
                        second = _first_step(one, cut_steps, sharing) // steps < cut
                        slot = shares + (2 * one + second.to(tl.int32)).to(tl.int64) * SLOT
                        total += tl.load(slot + in_tile + in_columns[None, :], mask=some_rows, other=0.0)
                        if GATED:
                            total_up += tl.load(slot + UP + in_tile + in_columns[None, :], mask=some_rows, other=0.0)
                    _finish(
                        total, total_up, out, row_factors, column_factors, row, first_column + in_columns, num_rows,
                        num_columns, GATED, ADDED, BLOCKS,
                    )  # fmt: skip


def persistent_linear(
    x: Tensor, weight: QuantizedWeight, tiling: PersistentTiling, room: ProductRoom, *, dependent: bool = False
) -> Tensor:
    """Computes x @ dequantize(weight).T. Rounds x to 8 bits as quantized_linear does; sums are kept in full precision.

    x: [num_rows, inner] contiguous; weight: of kind fp8, inner a multiple of ROW_ALIGNMENT
    tiling: if the weight is in blocks, as for quantized_linear
    dependent: see dependent_launch
    → [num_rows, num_columns] in x's dtype
    """
    out = x.new_empty(len(x), len(weight.data))
    _launch(x, weight, tiling, room, out=out, dependent=dependent)
    return out


def add_persistent_linear(
    x: Tensor, weight: QuantizedWeight, tiling: PersistentTiling, room: ProductRoom, *, out: Tensor,
    dependent: bool = False,
) -> None:  # fmt: skip
    """Computes out += x @ dequantize(weight).T, rounded once.

    out: [num_rows, num_columns] contiguous; for the others see persistent_linear
    """
    _launch(x, weight, tiling, room, out=out, added=True, dependent=dependent)


def persistent_gated_linear(
    x: Tensor, weight: QuantizedWeight, tiling: PersistentTiling, room: ProductRoom, *, dependent: bool = False
) -> Tensor:
    """Computes silu(x @ gate.T) * (x @ up.T) of the dequantised halves of the weight.

    weight: of shape [2 * num_columns, inner], gate first; if it is in blocks, BLOCK divides num_columns
    for the others see persistent_linear
    → [num_rows, num_columns] in x's dtype
    """
    out = x.new_empty(len(x), len(weight.data) // 2)
    _launch(x, weight, tiling, room, out=out, gated=True, dependent=dependent)
    return out


def _launch(
    x: Tensor,
    weight: QuantizedWeight,
    tiling: PersistentTiling,
    room: ProductRoom,
    *,
    out: Tensor,
    gated: bool = False,
    added: bool = False,
    dependent: bool,
) -> None:
    rows, columns = out.shape
    if not rows:
        return
    division = division_of(
        tiles=triton.cdiv(rows, tiling.rows) * triton.cdiv(columns, tiling.columns),
        steps=triton.cdiv(weight.inner, tiling.inner),
        programs=room.multiprocessors * tiling.programs,
        least_saved=tiling.least_saved,
    )
    narrow, row_factors = (quantize_groups if weight.in_blocks else quantize_rows)(x, dependent=dependent)
    _persistent_matmul[(division.programs,)](
        TensorDescriptor.from_tensor(narrow, [tiling.rows, tiling.inner]),
        TensorDescriptor.from_tensor(weight.data, [tiling.columns, tiling.inner]),
        weight.data, row_factors, weight.scale, out, room.shares, room.arrivals, rows, columns, weight.inner,
        division.waves, division.sharing, gated, added, weight.in_blocks, tiling.rows, tiling.columns, tiling.inner,
        min(MERGED_COLUMNS, tiling.columns), GROUP_ROWS, AHEAD, LINE, dependent, num_warps=tiling.warps,
        num_stages=tiling.stages, **launch_options(dependent),
    )  # fmt: skip
