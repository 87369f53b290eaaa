"""A feed-forward part of several experts: grouped products, in which each expert multiplies the tokens that chose it.

A decode step reads the weights of nearly all experts for a few rows each, so the time is that of reading them. Tiles
of a prompt that share an expert are computed at the same time, while its weight is in the L2 cache.

Reference: trunkline_kernels.experts.multiply_experts, with dequantize() of the weights. If those are fp8, activations
are rounded to 8 bits, as in quantized_linear.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from trunkline_kernels.expert_routing import Routing
from trunkline_kernels.gpu.decode_tiling import HOPPER_SHARED_MEMORY
from trunkline_kernels.gpu.dependent_launch import launch_options, wait_for_inputs
from trunkline_kernels.gpu.expert_tiles import ExpertTiles
from trunkline_kernels.gpu.matmul_tiling import MatmulTiling
from trunkline_kernels.gpu.quantized_linear import quantize_groups, quantize_rows
from trunkline_kernels.gpu.tile_order import GROUP_ROWS, tile_at
from trunkline_kernels.quantized_weight import BLOCK, HALF, ZERO, QuantizedWeight

_ZERO = tl.constexpr(ZERO)
SUMMED_COLUMNS = 1024  # of a program that adds up the results of a token's experts

FLOAT32_INNER = (
    16  # inner elements of a tile in float32, which tensor cores do not multiply: with more, registers spill
)

ExpertWeight = Tensor | QuantizedWeight


@dataclass(frozen=True, slots=True)
class ExpertTilings:
    """The tilings of a feed-forward part. Both have equal rows. One of `gate_up` computes as many columns of gate as of
    up."""

    gate_up: MatmulTiling
    down: MatmulTiling


# By the rows that an expert has on average: up to 8, 16, 32, and more. The rows of tiles are those of vLLM's table for
# 128 experts of 768 columns on an H200, for which a kernel of this kind was timed with many tilings.
BY_ROWS = (
    (8, ExpertTilings(MatmulTiling(16, 32, 128, 4, 3), MatmulTiling(16, 64, 128, 4, 3))),
    (16, ExpertTilings(MatmulTiling(32, 64, 64, 4, 4), MatmulTiling(32, 128, 64, 4, 4))),
    (32, ExpertTilings(MatmulTiling(64, 64, 64, 4, 3), MatmulTiling(64, 128, 64, 4, 3))),
)
MANY_ROWS = ExpertTilings(MatmulTiling(128, 64, 64, 8, 3), MatmulTiling(128, 128, 64, 8, 3))
# These read less of the L2 cache. They need a weight that is multiplied as it is stored, and tensor cores that read
# both factors from shared memory, as Hopper's and later ones do: others need more registers.
WIDE = ExpertTilings(MatmulTiling(128, 128, 64, 8, 3), MatmulTiling(128, 256, 64, 8, 3))
# Under --deterministic. Reading the weights limits a decode step with these, too.
FIXED = BY_ROWS[-1][1]
# Columns of gate_up, at most, for groups of 4 bits that are smaller than a tile's inner elements, on chips before
# Hopper: their zero points and scales take registers that tiles of 64 rows do not leave.
SMALL_GROUP_COLUMNS = 32


def expert_tilings(
    num_tokens: int, *, top_k: int, num_experts: int, weight: ExpertWeight, shared_memory: int, fixed: bool = False
) -> ExpertTilings:
    """Returns the tilings of a step, by the rows of an expert if all have equally many. They change only at numbers of
    tokens that are powers of two, so that the warm-up compiles all that are used.

    weight: of one of the products; shared_memory: bytes of a program
    fixed: tilings that do not depend on the number of tokens
    """
    is_hopper = shared_memory >= HOPPER_SHARED_MEMORY
    is_16_bits = isinstance(weight, Tensor) and weight.dtype.itemsize == 2
    rows = (1 << max(0, num_tokens.bit_length() - 1)) * top_k / num_experts
    by_rows = (tilings for most, tilings in BY_ROWS if rows <= most)
    tilings = FIXED if fixed else next(by_rows, WIDE if is_16_bits and is_hopper else MANY_ROWS)
    if tilings.gate_up.rows < 64 or is_hopper or not _has_small_groups(weight):
        return tilings
    return replace(tilings, gate_up=replace(tilings.gate_up, columns=SMALL_GROUP_COLUMNS))


def _has_small_groups(weight: ExpertWeight) -> bool:
    return isinstance(weight, QuantizedWeight) and weight.kind == "int4" and weight.group < 2 * HALF


@triton.jit
def _weight_tile(
    weight, scale, zero, line, some_lines, start, dtype: tl.constexpr, INNER: tl.constexpr, FOUR_BITS: tl.constexpr,
    ZEROS: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, TILE_INNER: tl.constexpr,
):  # fmt: skip
    """Returns a part of some lines of the weight: [TILE_INNER, lines], in `dtype`. int8 and fp8 have no scale yet."""
    if FOUR_BITS:
        half = tl.arange(0, HALF)
        packed = tl.load(
            weight + line[None, :] * (INNER // 2) + start // 2 + half[:, None], mask=some_lines[None, :], other=0
        ).to(tl.int32)
        of_group = line * (INNER // GROUP) + start // GROUP
        low_factor = tl.load(scale + of_group, mask=some_lines, other=0.0)[None, :]
        high_factor = low_factor
        low_zero = tl.full([1, line.shape[0]], _ZERO, tl.int32)
        if ZEROS:
            low_zero = tl.load(zero + of_group, mask=some_lines, other=0).to(tl.int32)[None, :]
        high_zero = low_zero
        if GROUP % (2 * HALF):  # the two halves may belong to two groups
            of_group = line * (INNER // GROUP) + (start + HALF) // GROUP
            high_factor = tl.load(scale + of_group, mask=some_lines, other=0.0)[None, :]
            if ZEROS:
                high_zero = tl.load(zero + of_group, mask=some_lines, other=0).to(tl.int32)[None, :]
        low = (((packed & 15) - low_zero).to(tl.float32) * low_factor).to(dtype)
        high = (((packed >> 4) - high_zero).to(tl.float32) * high_factor).to(dtype)
        return tl.reshape(tl.permute(tl.join(low, high), (2, 0, 1)), [2 * HALF, line.shape[0]])
    else:
        inner = start + tl.arange(0, TILE_INNER)
        inside = some_lines[None, :] & (inner < INNER)[:, None]
        return tl.load(weight + line[None, :] * INNER + inner[:, None], mask=inside, other=0.0).to(dtype)


@triton.jit
def _added(acc, left, right, row_factors, block_scale, NARROW: tl.constexpr, BLOCK: tl.constexpr):
    """Returns acc + left @ right. row_factors, block_scale: not read unless BLOCK"""
    if BLOCK:
        return acc + tl.dot(left, right) * (row_factors * tl.load(block_scale))[:, None]
    elif NARROW:
        # Hopper's 8-bit products keep 14 bits of their sums, so each tile's sum is added in full precision.
        return tl.dot(left, right, acc, max_num_imprecise_acc=right.shape[0])
    else:
        return tl.dot(left, right, acc, input_precision="ieee")


@triton.jit(do_not_specialize=["num_rows"])
def _expert_product(
    x, x_scale,  # [num_rows, INNER]; x_scale not read unless NARROW: [num_rows] float32, or [INNER / BLOCK, num_rows]
    weight,  # [number of experts * LINES, INNER]; int4: [..., INNER / 2] uint8
    scale,  # float32, of the weight's lines if SCALED, of their groups if FOUR_BITS, of its blocks if BLOCK
    zero,  # [number of experts * LINES, INNER / GROUP] uint8; not read unless ZEROS
    out,  # [number of pairs, COLUMNS] ←
    tile_experts, tile_pairs, num_tiles,  # of ExpertTiles
    num_rows,
    PAIRS_PER_ROW: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    GATED: tl.constexpr,  # LINES is 2 * COLUMNS, gate first; else COLUMNS
    SCALED: tl.constexpr,
    NARROW: tl.constexpr,  # x and the weight are fp8
    BLOCK: tl.constexpr,  # 0: the weight is not in blocks
    FOUR_BITS: tl.constexpr,
    ZEROS: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_INNER: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Multiplies the row of each pair by the weight of its expert.

    Grid: (most tiles * column tiles), in the order of tile_at(). If BLOCK, it divides COLUMNS, TILE_INNER is BLOCK, and
    TILE_COLUMNS divides it. If FOUR_BITS, TILE_INNER is 2 * HALF.
    """
    wait_for_inputs(DEPENDENT)
    row_tiles, column_tiles = tl.load(num_tiles), tl.cdiv(COLUMNS, TILE_COLUMNS)
    if tl.program_id(0) >= row_tiles * column_tiles:
        return
    tile, column_tile = tile_at(tl.program_id(0), row_tiles, column_tiles, GROUP_ROWS)
    # 64 bits: all weights of a layer together may have more than 2**31 elements.
    first_line = tl.load(tile_experts + tile).to(tl.int64) * (COLUMNS * (2 if GATED else 1))
    pair = tl.load(tile_pairs + tile * TILE_ROWS + tl.arange(0, TILE_ROWS))
    some_rows = pair >= 0
    row = (pair // PAIRS_PER_ROW).to(tl.int64)
    column = column_tile * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    some_columns = column < COLUMNS
    line = first_line + column
    kind: tl.constexpr = x.dtype.element_ty
    acc = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    up = acc
    for start in tl.range(0, INNER, TILE_INNER):
        inner = start + tl.arange(0, TILE_INNER)
        left = tl.load(
            x + row[:, None] * INNER + inner[None, :], mask=some_rows[:, None] & (inner < INNER)[None, :], other=0.0
        )
        if BLOCK:
            row_factors = tl.load(x_scale + start // BLOCK * num_rows + row, mask=some_rows, other=0.0)
            first_block = first_line // BLOCK + column_tile * TILE_COLUMNS // BLOCK
            block = scale + first_block * tl.cdiv(INNER, BLOCK) + start // BLOCK
            up_block = block + COLUMNS // BLOCK * tl.cdiv(INNER, BLOCK)
        else:
            row_factors, block, up_block = row, scale, scale  # not read
        right = _weight_tile(
            weight, scale, zero, line, some_columns, start, kind, INNER, FOUR_BITS, ZEROS, GROUP, HALF, TILE_INNER
        )
        acc = _added(acc, left, right, row_factors, block, NARROW, BLOCK)
        if GATED:
            right = _weight_tile(
                weight, scale, zero, line + COLUMNS, some_columns, start, kind, INNER, FOUR_BITS, ZEROS, GROUP, HALF,
                TILE_INNER,
            )  # fmt: skip
            up = _added(up, left, right, row_factors, up_block, NARROW, BLOCK)
    if SCALED:
        acc *= tl.load(scale + line, mask=some_columns, other=0.0)[None, :]
        if GATED:
            up *= tl.load(scale + line + COLUMNS, mask=some_columns, other=0.0)[None, :]
        if NARROW:
            of_rows = tl.load(x_scale + row, mask=some_rows, other=0.0)[:, None]
            acc *= of_rows
            up *= of_rows
    dtype: tl.constexpr = out.dtype.element_ty
    place = out + pair.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    inside = some_rows[:, None] & some_columns[None, :]
    if GATED:
        # Rounded where separate kernels would round.
        gate = acc.to(dtype).to(tl.float32)
        tl.store(place, (gate / (1 + tl.exp(-gate))).to(dtype) * up.to(dtype), mask=inside)
    else:
        tl.store(place, acc.to(dtype), mask=inside)


@triton.jit
def _sum_experts(
    results,  # [num_tokens, TOP_K, HIDDEN]
    experts,  # [num_tokens, TOP_K] int32
    shares,  # [num_tokens, TOP_K] float32
    out,  # [num_tokens, HIDDEN] ←
    num_experts,
    TOP_K: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Adds up the results of each token's experts, times their shares. Grid: (num_tokens, blocks of HIDDEN)."""
    wait_for_inputs(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(TOP_K):
        pair = token * TOP_K + place
        is_one = tl.load(experts + pair) < num_experts  # padding has no experts, and no results
        result = tl.load(results + pair * HIDDEN + at, mask=is_one & (at < HIDDEN), other=0.0)
        total += result.to(tl.float32) * tl.load(shares + pair)
    tl.store(out + token * HIDDEN + at, total.to(out.dtype.element_ty), mask=at < HIDDEN)


def multiply_experts(
    x: Tensor,
    routing: Routing,
    gate_up: ExpertWeight,
    down: ExpertWeight,
    *,
    tilings: ExpertTilings,
    loads: Tensor | None = None,
    dependent: bool = False,
) -> Tensor:
    """Returns the sum of each token's experts' results, times their shares: [num_tokens, hidden] in x's dtype.

    The summands are rounded to x's dtype, and added in float32 in the order of `routing`.

    x: [num_tokens, hidden] contiguous; routing: of expert_choice.route
    gate_up: [num_experts * 2 * intermediate, hidden], gate and up of the first expert, then of the second one
    down: [num_experts * hidden, intermediate]; if weights are in blocks, BLOCK divides hidden and intermediate
    loads: [num_experts] int64, to which the tokens of each expert are added
    dependent: see dependent_launch
    """
    (num_tokens, hidden), (experts, shares) = x.shape, routing
    if isinstance(down, Tensor):
        lines, intermediate = down.shape
    else:
        lines, intermediate = len(down.data), down.inner
    num_experts = lines // hidden
    out = torch.empty_like(x)
    if not num_tokens:
        return out
    tiles = ExpertTiles.arrange(
        experts, num_experts=num_experts, rows=tilings.down.rows, loads=loads, dependent=dependent
    )
    gated = x.new_empty(experts.numel(), intermediate)
    _multiply(x, gate_up, tiles, tilings.gate_up, out=gated, gated=True, dependent=dependent)
    results = x.new_empty(experts.numel(), hidden)
    _multiply(gated, down, tiles, tilings.down, out=results, gated=False, dependent=dependent)
    block = min(SUMMED_COLUMNS, triton.next_power_of_2(hidden))
    _sum_experts[(num_tokens, triton.cdiv(hidden, block))](
        results, experts, shares, out, num_experts, experts.shape[1], hidden, block, dependent,
        num_warps=max(1, block // 256), **launch_options(dependent),
    )  # fmt: skip
    return out


def _multiply(
    x: Tensor,
    weight: ExpertWeight,
    tiles: ExpertTiles,
    tiling: MatmulTiling,
    *,
    out: Tensor,
    gated: bool,
    dependent: bool,
) -> None:
    """Multiplies the row of each pair by the weight of its expert.

    x: [num_pairs / n, inner]: each row is that of n pairs; out: [num_pairs, columns] ←
    """
    (num_pairs, columns), (num_rows, inner) = out.shape, x.shape
    narrow, factors, pairs_per_row = x, x, num_pairs // num_rows
    if isinstance(weight, Tensor):
        kind, group, in_blocks, data, scale, zero = "", 1, False, weight, x, None
    else:
        assert not weight.for_cpus, "the kernel has no offsets, nor int8 in groups"
        kind, group, in_blocks, data, scale, zero = (
            weight.kind, weight.group, weight.in_blocks, weight.data, weight.scale, weight.zero,
        )  # fmt: skip
    if kind == "fp8":
        narrow, factors = (quantize_groups if in_blocks else quantize_rows)(x, dependent=dependent)
    is_wide = x.dtype.itemsize == 4
    tile_inner = {"fp8": BLOCK, "int4": 2 * HALF}.get(kind, FLOAT32_INNER if is_wide else tiling.inner)
    grid = len(tiles.experts) * triton.cdiv(columns, tiling.columns)
    _expert_product[(grid,)](
        narrow, factors, data, scale, data if zero is None else zero, out, tiles.experts, tiles.pairs, tiles.num_tiles,
        num_rows, pairs_per_row, columns, inner, gated, kind in ("int8", "fp8") and not in_blocks, kind == "fp8",
        BLOCK if in_blocks else 0, kind == "int4", zero is not None, group, HALF, tiling.rows, tiling.columns,
        tile_inner, GROUP_ROWS, dependent, num_warps=tiling.warps, num_stages=1 if is_wide else tiling.stages,
        **launch_options(dependent),
    )  # fmt: skip
