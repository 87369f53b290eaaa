"""Writes an int8 or int4 weight in the dtype of activations, for products of many rows through the library.

Reference: trunkline_kernels.quantized_weight.dequantize.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trunkline_kernels.quantized_weight import HALF, ZERO, QuantizedWeight

_ZERO = tl.constexpr(ZERO)
PIECES = 32  # of 2 * HALF elements, for each program


@triton.jit
def _widen(
    weight,  # [num_columns, INNER] int8, or [num_columns, INNER / 2] uint8
    scale,  # [num_columns] float32, or [num_columns, INNER / GROUP]
    zero,  # [num_columns, INNER / GROUP] uint8; not read unless ZEROS
    out,  # [num_columns, INNER] ←
    INNER: tl.constexpr,
    FOUR_BITS: tl.constexpr,
    ZEROS: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    PIECES: tl.constexpr,
):  # fmt: skip
    """Grid: (num_columns, pieces of a column / PIECES)."""
    column = tl.program_id(0).to(tl.int64)
    if FOUR_BITS:
        piece = tl.program_id(1) * PIECES + tl.arange(0, PIECES)[:, None]
        at = tl.arange(0, HALF)[None, :]
        known = piece * 2 * HALF < INNER
        packed = tl.load(weight + column * (INNER // 2) + piece * HALF + at, mask=known, other=0).to(tl.int32)
        for high in tl.static_range(2):
            element = piece * 2 * HALF + high * HALF
            of_group = column * (INNER // GROUP) + element // GROUP
            factor = tl.load(scale + of_group, mask=known, other=0.0)
            value = (packed >> 4 * high) & 15
            if ZEROS:
                value -= tl.load(zero + of_group, mask=known, other=0).to(tl.int32)
            else:
                value -= _ZERO
            values = (value.to(tl.float32) * factor).to(out.dtype.element_ty)
            tl.store(out + column * INNER + element + at, values, mask=known)
    else:
        at = tl.program_id(1) * PIECES * 2 * HALF + tl.arange(0, PIECES * 2 * HALF)
        value = tl.load(weight + column * INNER + at, mask=at < INNER, other=0)
        values = (value.to(tl.float32) * tl.load(scale + column)).to(out.dtype.element_ty)
        tl.store(out + column * INNER + at, values, mask=at < INNER)


def widened(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    """Returns the values of an int8 or int4 weight in `dtype`: [num_columns, inner]."""
    assert weight.kind != "fp8", "8-bit floats are multiplied as they are"
    assert not weight.for_cpus, "the kernel has no offsets, nor int8 in groups"
    columns = len(weight.data)
    out = torch.empty(columns, weight.inner, dtype=dtype, device=weight.data.device)
    _widen[columns, triton.cdiv(weight.inner, PIECES * 2 * HALF)](
        weight.data, weight.scale, weight.data if weight.zero is None else weight.zero, out, weight.inner,
        weight.kind == "int4", weight.zero is not None, weight.group, HALF, PIECES,
    )  # fmt: skip
    return out
