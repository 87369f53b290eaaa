"""Quantised weights, as kernels take them.

An int8 or fp8 weight is the stored value times a scale, one per column of the product. Those of int8 may be per column
and group of the inner dimension; those of fp8 per block of 128 columns and 128 inner elements, as in the checkpoints of
DeepSeek and Qwen. An int4 weight is the stored value from 0 to 15, minus a zero point, times a scale; or the value
times the scale, plus an offset. All of them are per column and group. quantize() uses the zero point 8; checkpoints
quantised elsewhere may have others.

Sources: scales per column: Dettmers et al. (2022); groups of 128 for 4 bits: Frantar et al. (2023); fp8 in blocks:
DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 3.3.2.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

GROUP = 128  # inner elements that share a scale in the int4 weights of quantize(), or half of it
ZERO = 8  # the zero point of these weights
HALF = 32  # 64 inner elements take 32 bytes: byte i has element i in its low and element 32 + i in its high four bits
BLOCK = 128  # columns and inner elements of a block of an fp8 weight that share a scale
FP8 = torch.float8_e4m3fn
FP8_LARGEST = 448.0
KINDS = ("int8", "int4", "fp8")
COLUMNS_AT_ONCE = 4096  # that quantize() has in float32: the experts of a layer are one weight of gigabytes


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A quantised weight of shape [num_columns, inner]."""

    kind: str  # one of KINDS
    data: Tensor  # int8 or fp8 [num_columns, inner]; for int4, uint8 [num_columns, inner / 2]
    # float32 [num_columns]; int4, and int8 in groups: [num_columns, inner / group]; fp8 in blocks:
    # [num_columns / BLOCK, inner / BLOCK], rounded up
    scale: Tensor
    inner: int
    group: int = GROUP  # inner elements that share a scale of int4, or of int8 in groups
    zero: Tensor | None = None  # uint8 [num_columns, inner / group], int4 only; None: ZERO everywhere
    offset: Tensor | None = None  # float32 [num_columns, inner / group], int4 only; instead of a zero point

    @property
    def in_blocks(self) -> bool:
        """Whether this is an fp8 weight with a scale per block."""
        return self.kind == "fp8" and self.scale.dim() == 2

    @property
    def for_cpus(self) -> bool:
        """Whether kernels for this form exist on CPUs alone: int8 in groups, and offsets."""
        return self.offset is not None or (self.kind == "int8" and self.scale.dim() == 2)


def quantize(weight: Tensor, kind: str) -> QuantizedWeight:
    """Returns the weight [num_columns, inner] quantised as `kind`, one of KINDS.

    Raises ValueError if the kind is unknown or the shape does not allow it.
    """
    whole = _quantize_columns(weight[:COLUMNS_AT_ONCE], kind)
    columns = len(weight)
    if columns <= COLUMNS_AT_ONCE:
        return whole
    first, whole = (
        whole,
        replace(
            whole,
            data=whole.data.new_empty(columns, *whole.data.shape[1:]),
            scale=whole.scale.new_empty(columns, *whole.scale.shape[1:]),
        ),
    )
    for start in range(0, columns, COLUMNS_AT_ONCE):
        part = slice(start, start + COLUMNS_AT_ONCE)
        quantized = _quantize_columns(weight[part], kind) if start else first
        whole.data[part], whole.scale[part] = quantized.data, quantized.scale
    return whole


def _quantize_columns(weight: Tensor, kind: str) -> QuantizedWeight:
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
    if inner % (2 * HALF):
        raise ValueError(f"int4 weights need an inner dimension that {2 * HALF} divides, not {inner}")
    group = GROUP if inner % GROUP == 0 else GROUP // 2
    groups = wide.view(columns, inner // group, group)
    # The largest value of a group, whatever its sign, becomes -8, so that all 16 numbers are in use.
    scale = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True)) / -ZERO
    scale = torch.where(scale.abs() < 1e-12, 1e-12, scale)
    values = ((groups / scale).round_().clamp_(-ZERO, 15 - ZERO) + ZERO).to(torch.uint8)
    return packed_int4(values.view(columns, inner), scale[..., 0])


def quantize_blocks(weight: Tensor) -> QuantizedWeight:
    """Returns the weight [num_columns, inner] as fp8 with a scale per block. Blocks at the ends may be smaller."""
    columns, inner = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -inner % BLOCK, 0, -columns % BLOCK))
    blocks = padded.view(len(padded) // BLOCK, BLOCK, -1, BLOCK)
    scale = (blocks.abs().amax(dim=(1, 3)) / FP8_LARGEST).clamp_(min=1e-12)
    data = (blocks / scale[:, None, :, None]).view_as(padded)[:columns, :inner].to(FP8).contiguous()
    return QuantizedWeight("fp8", data, scale, inner)


def packed_int4(
    values: Tensor, scale: Tensor, zero: Tensor | None = None, *, offset: Tensor | None = None
) -> QuantizedWeight:
    """Returns an int4 weight of unpacked 4-bit values, as a checkpoint may have them.

    values: uint8 [num_columns, inner], 0 to 15; scale: float32 [num_columns, num_groups], groups of at least 32
    zero: uint8 [num_columns, num_groups]; None: 8 everywhere, unless there is an offset
    offset: float32 [num_columns, num_groups]
    Raises ValueError if the kernel does not support the shapes.
    """
    columns, inner = values.shape
    group = inner // scale.shape[1]
    if inner % (2 * HALF) or group % HALF or group * scale.shape[1] != inner:
        raise ValueError(
            f"int4 weights need an inner dimension that {2 * HALF} divides and groups that {HALF} divides, not {inner} "
            f"in {scale.shape[1]} groups"
        )
    low, high = values.view(columns, inner // (2 * HALF), 2, HALF).unbind(dim=2)
    data = (low | (high << 4)).reshape(columns, inner // 2).contiguous()
    return QuantizedWeight("int4", data, scale, inner, group, zero, offset)


def unpacked_int4(weight: QuantizedWeight) -> Tensor:
    """Returns the stored values of an int4 weight: uint8 [num_columns, inner], 0 to 15."""
    packed = weight.data.view(len(weight.data), weight.inner // (2 * HALF), HALF)
    return torch.stack([packed & 15, packed >> 4], dim=2).view(-1, weight.inner)


def columns_of(weight: QuantizedWeight, columns: slice) -> QuantizedWeight:
    """Returns some columns of a weight, which share its memory. Its scales are not in blocks."""
    assert not weight.in_blocks, "a block may reach beyond the columns"
    return replace(
        weight,
        data=weight.data[columns],
        scale=weight.scale[columns],
        zero=None if weight.zero is None else weight.zero[columns],
        offset=None if weight.offset is None else weight.offset[columns],
    )


def dequantize(weight: QuantizedWeight) -> Tensor:
    """Returns the values of a quantised weight: [num_columns, inner] float32."""
    if weight.in_blocks:
        of_columns = weight.scale.repeat_interleave(BLOCK, dim=0)[: len(weight.data)]
        return weight.data.float() * of_columns.repeat_interleave(BLOCK, dim=1)[:, : weight.inner]
    columns = len(weight.data)
    values = unpacked_int4(weight) if weight.kind == "int4" else weight.data
    grouped = values.float().view(columns, weight.scale.view(columns, -1).shape[1], -1)
    if weight.kind == "int4" and weight.offset is None:
        grouped -= ZERO if weight.zero is None else weight.zero[..., None].float()
    grouped *= weight.scale.view(columns, -1, 1)
    if weight.offset is not None:
        grouped += weight.offset[..., None]
    return grouped.view(columns, weight.inner)
