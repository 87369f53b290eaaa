"""Matrix products with quantised weights: int8 and int4 weights with unquantised activations, and fp8 for both.

A decode step reads every weight once, so it gains from weights of half or a quarter of the size. Prompts gain from
8-bit tensor cores.

Reference: torch's linear() with dequantize(weight). Source: 8-bit floats: Micikevicius et al. (2022).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from trunkline_kernels.gpu.dependent_launch import launch_options, wait_for_inputs
from trunkline_kernels.gpu.matmul_tiling import MatmulTiling
from trunkline_kernels.gpu.tile_order import GROUP_ROWS, tile_at
from trunkline_kernels.quantized_weight import BLOCK, FP8, HALF, ZERO, QuantizedWeight

_ZERO = tl.constexpr(ZERO)
TILE_COLUMNS = 64
LIBRARY_ALIGNMENT = 16  # the library needs both dimensions of an 8-bit weight to be multiples of it


@dataclass(frozen=True, slots=True)
class Fp8Tiling(MatmulTiling):
    """The tiling of a product of 8-bit floats."""


@triton.jit(do_not_specialize=["num_rows"])
def _weight_only(
    x,  # [num_rows, INNER]
    weight,  # [num_columns, INNER] int8, or [num_columns, INNER / 2] uint8
    scale,  # [num_columns] float32, or [num_columns, INNER / GROUP]
    zero,  # [num_columns, INNER / GROUP] uint8; not read unless ZEROS
    bias,  # [num_columns]; not read unless BIAS
    out,  # [num_rows, num_columns]
    num_rows,
    num_columns,
    INNER: tl.constexpr,
    BIAS: tl.constexpr,
    FOUR_BITS: tl.constexpr,
    ZEROS: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
):  # fmt: skip
    """Multiplies by an int8 or int4 weight, 2 * HALF elements of the inner dimension at a time.

    Grid: (row tiles * column tiles), in the order of tile_at().
    """
    row_tiles, column_tiles = tl.cdiv(num_rows, TILE_ROWS), tl.cdiv(num_columns, TILE_COLUMNS)
    row_tile, column_tile = tile_at(tl.program_id(0), row_tiles, column_tiles, GROUP_ROWS)
    row = (row_tile * TILE_ROWS + tl.arange(0, TILE_ROWS)).to(tl.int64)
    column = (column_tile * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)).to(tl.int64)
    some_rows, some_columns = row < num_rows, column < num_columns
    half = tl.arange(0, HALF)
    whole = tl.arange(0, 2 * HALF)
    acc = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    for start in tl.range(0, INNER, 2 * HALF):
        if FOUR_BITS:
            packed = tl.load(
                weight + column[None, :] * (INNER // 2) + start // 2 + half[:, None],
                mask=some_columns[None, :],
                other=0,
            ).to(tl.int32)
            of_group = column * (INNER // GROUP) + start // GROUP
            low_factor = tl.load(scale + of_group, mask=some_columns, other=0.0)[None, :]
            high_factor = low_factor
            low_zero = tl.full([1, TILE_COLUMNS], _ZERO, tl.int32)
            if ZEROS:
                low_zero = tl.load(zero + of_group, mask=some_columns, other=0).to(tl.int32)[None, :]
            high_zero = low_zero
            if GROUP % (2 * HALF):  # the two halves may belong to two groups
                of_group = column * (INNER // GROUP) + (start + HALF) // GROUP
                high_factor = tl.load(scale + of_group, mask=some_columns, other=0.0)[None, :]
                if ZEROS:
                    high_zero = tl.load(zero + of_group, mask=some_columns, other=0).to(tl.int32)[None, :]
            low = (((packed & 15) - low_zero).to(tl.float32) * low_factor).to(x.dtype.element_ty)
            high = (((packed >> 4) - high_zero).to(tl.float32) * high_factor).to(x.dtype.element_ty)
            place = x + row[:, None] * INNER + start + half[None, :]
            left = tl.load(place, mask=some_rows[:, None], other=0.0)
            right = tl.load(place + HALF, mask=some_rows[:, None], other=0.0)
            acc = tl.dot(left, low, acc, input_precision="ieee")
            acc = tl.dot(right, high, acc, input_precision="ieee")
        else:
            known = start + whole < INNER
            left = tl.load(
                x + row[:, None] * INNER + start + whole[None, :], mask=some_rows[:, None] & known[None, :], other=0.0
            )
            eight = tl.load(
                weight + column[None, :] * INNER + start + whole[:, None],
                mask=some_columns[None, :] & known[:, None],
                other=0,
            )
            acc = tl.dot(left, eight.to(x.dtype.element_ty), acc, input_precision="ieee")
    if not FOUR_BITS:
        acc *= tl.load(scale + column, mask=some_columns, other=0.0)[None, :]
    if BIAS:
        acc += tl.load(bias + column, mask=some_columns, other=0.0).to(tl.float32)[None, :]
    place = out + row[:, None] * num_columns + column[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=some_rows[:, None] & some_columns[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _quantize_rows(
    x,  # [num_rows, INNER]
    out,  # [num_rows, INNER] fp8 ←
    scale,  # [groups of INNER, num_rows] float32 ←
    num_rows,
    INNER: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Rounds each row to fp8 with a scale for each GROUP elements. Grid: (num_rows)."""
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    values = tl.load(x + row * INNER + at, mask=at < INNER, other=0.0).to(tl.float32)
    factor = tl.maximum(tl.max(tl.abs(values), axis=1) / 448.0, 1e-12)
    tl.store(scale + group * num_rows + row, factor, mask=group * GROUP < INNER)
    tl.store(out + row * INNER + at, (values / factor[:, None]).to(out.dtype.element_ty), mask=at < INNER)


@triton.jit(do_not_specialize=["num_rows"])
def _fp8_product(
    x, x_scale,  # [num_rows, INNER] fp8; [num_rows] float32, or [INNER / BLOCK, num_rows] if BLOCK
    weight, scale,  # [num_columns, INNER] fp8; [num_columns] float32, or [num_columns / BLOCK, INNER / BLOCK] if BLOCK
    bias,  # [num_columns]; not read unless BIAS
    out,  # [num_rows, num_columns]
    num_rows,
    num_columns,
    INNER: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,  # 0: one scale per row and per column
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_INNER: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
):  # fmt: skip
    """Multiplies fp8 rows by an fp8 weight. Grid: (row tiles * column tiles), in the order of tile_at().

    If BLOCK, TILE_INNER is BLOCK, and TILE_COLUMNS divides it.
    """
    row_tiles, column_tiles = tl.cdiv(num_rows, TILE_ROWS), tl.cdiv(num_columns, TILE_COLUMNS)
    row_tile, column_tile = tile_at(tl.program_id(0), row_tiles, column_tiles, GROUP_ROWS)
    row = (row_tile * TILE_ROWS + tl.arange(0, TILE_ROWS)).to(tl.int64)
    column = (column_tile * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)).to(tl.int64)
    some_rows, some_columns = row < num_rows, column < num_columns
    inner = tl.arange(0, TILE_INNER)
    acc = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    for start in tl.range(0, INNER, TILE_INNER):
        known = start + inner < INNER
        left = tl.load(
            x + row[:, None] * INNER + start + inner[None, :], mask=some_rows[:, None] & known[None, :], other=0.0
        )
        right = tl.load(
            weight + column[None, :] * INNER + start + inner[:, None],
            mask=some_columns[None, :] & known[:, None],
            other=0.0,
        )
        if BLOCK:
            factor = tl.load(x_scale + start // BLOCK * num_rows + row, mask=some_rows, other=0.0)
            of_block = column_tile * TILE_COLUMNS // BLOCK * tl.cdiv(INNER, BLOCK) + start // BLOCK
            acc += tl.dot(left, right) * (factor * tl.load(scale + of_block))[:, None]
        else:
            # Hopper's 8-bit products keep 14 bits of their sums, so each tile's sum is added in full precision.
            acc = tl.dot(left, right, acc, max_num_imprecise_acc=TILE_INNER)
    if not BLOCK:
        acc *= tl.load(x_scale + row, mask=some_rows, other=0.0)[:, None]
        acc *= tl.load(scale + column, mask=some_columns, other=0.0)[None, :]
    if BIAS:
        acc += tl.load(bias + column, mask=some_columns, other=0.0).to(tl.float32)[None, :]
    place = out + row[:, None] * num_columns + column[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=some_rows[:, None] & some_columns[None, :])


def quantize_rows(x: Tensor, *, dependent: bool = False) -> tuple[Tensor, Tensor]:
    """Returns x rounded to fp8 [num_rows, inner], and the scale of each row [num_rows] float32.

    x: [num_rows, inner] contiguous; dependent: see dependent_launch
    """
    narrow, scale = _rounded(x, triton.next_power_of_2(x.shape[1]), dependent)
    return narrow, scale[0]


def quantize_groups(x: Tensor, *, dependent: bool = False) -> tuple[Tensor, Tensor]:
    """Returns x rounded to fp8 [num_rows, inner], and a scale for each BLOCK elements of a row, float32 [inner / BLOCK,
    num_rows], rounded up. The scales that one step of a product needs are then contiguous.

    Source: DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 3.3.2.

    x: [num_rows, inner] contiguous; dependent: see dependent_launch
    """
    return _rounded(x, BLOCK, dependent)


def _rounded(x: Tensor, group: int, dependent: bool) -> tuple[Tensor, Tensor]:
    rows, inner = x.shape
    groups = triton.cdiv(inner, group)
    out, scale = torch.empty_like(x, dtype=FP8), torch.empty(groups, rows, dtype=torch.float32, device=x.device)
    if rows:
        _quantize_rows[(rows,)](
            x, out, scale, rows, inner, group, triton.next_power_of_2(groups), dependent, num_warps=8,
            **launch_options(dependent),
        )  # fmt: skip
    return out, scale


def fp8_tiling(rows: int) -> Fp8Tiling:
    """Returns the tiling of a product of `rows` rows that was not timed."""
    return Fp8Tiling(_tile_rows(rows), TILE_COLUMNS, 128, 4, 3)


def _tile_rows(rows: int) -> int:
    return min(128, max(16, 1 << (rows - 1).bit_length()))


def library_fp8_linear(x: Tensor, weight: QuantizedWeight, *, dependent: bool = False) -> Tensor:
    """Computes x @ dequantize(weight).T with the library. Rounds x to 8 bits as quantized_linear does; sums are kept in
    full precision.

    x: [num_rows, inner] contiguous; weight: of kind fp8, for which library_takes() is true
    dependent: see dependent_launch
    → [num_rows, num_columns] in x's dtype
    """
    if not len(x):
        return x.new_empty(0, len(weight.data))
    narrow, x_scale = quantize_rows(x, dependent=dependent)
    return torch._scaled_mm(
        narrow, weight.data.t(), scale_a=x_scale[:, None], scale_b=weight.scale[None, :], out_dtype=x.dtype
    )


def library_takes(weight: QuantizedWeight) -> bool:
    """Whether library_fp8_linear supports this weight."""
    columns, inner = weight.data.shape
    return (
        weight.kind == "fp8" and not weight.in_blocks and columns % LIBRARY_ALIGNMENT == inner % LIBRARY_ALIGNMENT == 0
    )


def quantized_linear(
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None = None,
    tiling: Fp8Tiling | None = None,
    *,
    dependent: bool = False,
) -> Tensor:
    """Computes x @ dequantize(weight).T + bias. With an fp8 weight, rounds x to 8 bits first, with a scale per row, or
    per BLOCK elements of a row if the weight is in blocks.

    x: [num_rows, inner] contiguous; weight: [num_columns, inner]; bias: [num_columns]
    tiling: for fp8; None: chosen by the number of rows. For blocks, `inner` is BLOCK, and `columns` divides it
    dependent: of the kernel that rounds x, see dependent_launch
    → [num_rows, num_columns] in x's dtype
    """
    assert not weight.for_cpus, "the kernel has no offsets, nor int8 in groups"
    rows = len(x)
    columns = len(weight.data)
    out = x.new_empty(rows, columns)
    if not rows:
        return out
    biased = bias is not None
    if weight.kind == "fp8":
        tiling = tiling or fp8_tiling(rows)
        narrow, x_scale = (quantize_groups if weight.in_blocks else quantize_rows)(x, dependent=dependent)
        _fp8_product[(triton.cdiv(columns, tiling.columns) * triton.cdiv(rows, tiling.rows),)](
            narrow, x_scale, weight.data, weight.scale, bias if biased else x, out, rows, columns, weight.inner,
            biased, BLOCK if weight.in_blocks else 0, tiling.rows, tiling.columns, tiling.inner, GROUP_ROWS,
            num_warps=tiling.warps, num_stages=tiling.stages,
        )  # fmt: skip
    else:
        tile_rows = _tile_rows(rows)
        grid = (triton.cdiv(columns, TILE_COLUMNS) * triton.cdiv(rows, tile_rows),)
        _weight_only[grid](
            x, weight.data, weight.scale, weight.data if weight.zero is None else weight.zero, bias if biased else x,
            out, rows, columns, weight.inner, biased, weight.kind == "int4", weight.zero is not None, weight.group,
            HALF, tile_rows, TILE_COLUMNS, GROUP_ROWS, num_warps=4, num_stages=3,
        )  # fmt: skip
    return out
