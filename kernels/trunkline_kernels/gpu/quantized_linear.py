"""Products with quantised weights: int8 and int4 weights alone, and 8-bit floats on both sides.

A decode step reads every weight once, so halving or quartering them is what such a step gains; prompts gain from 8-bit
tensor cores. Quantisation is symmetric: a weight is its integer times a scale, one per column of the product (int8,
fp8), or one per column and GROUP of the inner dimension (int4).

Twin: torch's linear() with dequantize(weight). Sources: scales per token and column: Dettmers et al. (2022); 8-bit
floats: Micikevicius et al. (2022); groups of 128 for 4 bits: Frantar et al. (2023).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

GROUP = 128  # inner elements that share a scale in int4
HALF = 32  # of 64 inner elements: byte i of 32 holds element i in its low and element 32 + i in its high four bits
FP8 = torch.float8_e4m3fn
FP8_LARGEST = 448.0
TILE_COLUMNS = 64
KINDS = ("int8", "int4", "fp8")


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A [num_columns, inner] weight."""

    kind: str
    data: Tensor  # int8 or fp8 [num_columns, inner], or uint8 [num_columns, inner / 2] of int4
    scale: Tensor  # float32 [num_columns], or [num_columns, inner / GROUP] of int4
    inner: int


def quantize(weight: Tensor, kind: str) -> QuantizedWeight:
    """weight: [num_columns, inner].  Raises ValueError where its shape does not allow it."""
    columns, inner = weight.shape
    wide = weight.float()
    if kind == "int8":
        scale = (wide.abs().amax(dim=1) / 127).clamp_(min=1e-12)
        return QuantizedWeight(kind, (wide / scale[:, None]).round_().to(torch.int8), scale, inner)
    if kind == "fp8":
        scale = (wide.abs().amax(dim=1) / FP8_LARGEST).clamp_(min=1e-12)
        return QuantizedWeight(kind, (wide / scale[:, None]).to(FP8), scale, inner)
    if kind != "int4":
        raise ValueError(f"quantisation {kind!r} is not one of {', '.join(KINDS)}")
    if inner % GROUP:
        raise ValueError(f"int4 weights need an inner dimension that {GROUP} divides, not {inner}")
    groups = wide.view(columns, inner // GROUP, GROUP)
    scale = (groups.abs().amax(dim=2) / 7).clamp_(min=1e-12)
    values = ((groups / scale[..., None]).round_().clamp_(-8, 7) + 8).to(torch.uint8)
    low, high = values.view(columns, inner // (2 * HALF), 2, HALF).unbind(dim=2)
    return QuantizedWeight(kind, (low | (high << 4)).reshape(columns, inner // 2).contiguous(), scale, inner)


def dequantize(weight: QuantizedWeight) -> Tensor:
    """→ [num_columns, inner] float32: what the quantised weight stands for."""
    if weight.kind != "int4":
        return weight.data.float() * weight.scale[:, None]
    columns = len(weight.data)
    packed = weight.data.view(columns, weight.inner // (2 * HALF), HALF)
    values = torch.stack([packed & 15, packed >> 4], dim=2).view(columns, -1, GROUP).float() - 8
    return (values * weight.scale[..., None]).view(columns, weight.inner)


@triton.jit(do_not_specialize=["num_rows"])
def _weight_only(
    x,  # [num_rows, INNER]
    weight,  # [num_columns, INNER] int8, or [num_columns, INNER / 2] uint8
    scale,  # [num_columns], or [num_columns, INNER / GROUP]
    bias,  # [num_columns]; not read unless BIAS
    out,  # [num_rows, num_columns]
    num_rows,
    num_columns,
    INNER: tl.constexpr,
    BIAS: tl.constexpr,
    FOUR_BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid: (column tiles, row tiles). 2 * HALF of the inner dimension at a time."""
    column = (tl.program_id(0) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)).to(tl.int64)
    row = (tl.program_id(1) * TILE_ROWS + tl.arange(0, TILE_ROWS)).to(tl.int64)
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
            factor = tl.load(scale + column * (INNER // GROUP) + start // GROUP, mask=some_columns, other=0.0)[None, :]
            low = (((packed & 15) - 8).to(tl.float32) * factor).to(x.dtype.element_ty)
            high = (((packed >> 4) - 8).to(tl.float32) * factor).to(x.dtype.element_ty)
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


@triton.jit
def _quantize_rows(
    x,  # [num_rows, INNER]
    out,  # [num_rows, INNER] fp8 ←
    scale,  # [num_rows] float32 ←
    INNER: tl.constexpr,
    PADDED: tl.constexpr,
):  # fmt: skip
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PADDED)
    values = tl.load(x + row * INNER + at, mask=at < INNER, other=0.0).to(tl.float32)
    factor = tl.maximum(tl.max(tl.abs(values)) / 448.0, 1e-12)
    tl.store(scale + row, factor)
    tl.store(out + row * INNER + at, (values / factor).to(out.dtype.element_ty), mask=at < INNER)


@triton.jit(do_not_specialize=["num_rows"])
def _fp8_product(
    x, x_scale,  # [num_rows, INNER] fp8, [num_rows]
    weight, scale,  # [num_columns, INNER] fp8, [num_columns]
    bias,  # [num_columns]; not read unless BIAS
    out,  # [num_rows, num_columns]
    num_rows,
    num_columns,
    INNER: tl.constexpr,
    BIAS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_INNER: tl.constexpr,
):  # fmt: skip
    """Grid: (column tiles, row tiles)."""
    column = (tl.program_id(0) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)).to(tl.int64)
    row = (tl.program_id(1) * TILE_ROWS + tl.arange(0, TILE_ROWS)).to(tl.int64)
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
        # Hopper's 8-bit products keep 14 bits of their sums: they are added up in full precision, tile by tile.
        acc = tl.dot(left, right, acc, max_num_imprecise_acc=TILE_INNER)
    acc *= tl.load(x_scale + row, mask=some_rows, other=0.0)[:, None]
    acc *= tl.load(scale + column, mask=some_columns, other=0.0)[None, :]
    if BIAS:
        acc += tl.load(bias + column, mask=some_columns, other=0.0).to(tl.float32)[None, :]
    place = out + row[:, None] * num_columns + column[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=some_rows[:, None] & some_columns[None, :])


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x: [num_rows, inner] → fp8 like it, and [num_rows] float32 that its rows are to be multiplied by"""
    rows, inner = x.shape
    out, scale = torch.empty_like(x, dtype=FP8), torch.empty(rows, dtype=torch.float32, device=x.device)
    if rows:
        _quantize_rows[(rows,)](x, out, scale, inner, triton.next_power_of_2(inner), num_warps=8)
    return out, scale


def quantized_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """x @ dequantize(weight).T + bias; of fp8 with x rounded to 8 bits, row by row.

    x: [num_rows, inner] contiguous, bias: [num_columns] → [num_rows, num_columns] in x's dtype
    """
    rows = len(x)
    columns = len(weight.data)
    out = x.new_empty(rows, columns)
    if not rows:
        return out
    tile_rows = min(128, max(16, triton.next_power_of_2(rows)))
    grid = (triton.cdiv(columns, TILE_COLUMNS), triton.cdiv(rows, tile_rows))
    biased = bias is not None
    if weight.kind == "fp8":
        narrow, x_scale = quantize_rows(x)
        _fp8_product[grid](
            narrow, x_scale, weight.data, weight.scale, bias if biased else x, out, rows, columns, weight.inner,
            biased, tile_rows, TILE_COLUMNS, 128, num_warps=4, num_stages=3,
        )  # fmt: skip
    else:
        _weight_only[grid](
            x, weight.data, weight.scale, bias if biased else x, out, rows, columns, weight.inner, biased,
            weight.kind == "int4", GROUP, HALF, tile_rows, TILE_COLUMNS, num_warps=4, num_stages=3,
        )  # fmt: skip
    return out
