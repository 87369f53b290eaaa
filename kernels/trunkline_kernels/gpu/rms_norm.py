"""Root mean square layer normalisation (Zhang and Sennrich, 2019), alone or after an addition to the residual stream.

Reference: trunkline_kernels.rms_norm.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trunkline_kernels.gpu.dependent_launch import launch_options, wait_for_inputs


@triton.jit
def _rms_norm(
    x,  # [num_rows, dim]; like residual and out, it has STRIDE elements from one row to the next
    residual,  # [num_rows, dim], overwritten with residual + x; not read unless ADD
    weight,  # [dim]
    out,  # [num_rows, dim]; may be x
    eps,
    STRIDE: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,  # DIM, padded to a power of two
    ADD: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: (num_rows)."""
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64) * STRIDE
    at = tl.arange(0, PADDED)
    inside = at < DIM
    values = tl.load(x + row + at, mask=inside, other=0.0)
    if ADD:
        # Rounded to the residual stream's dtype first, as two separate operations would do.
        values = (values.to(tl.float32) + tl.load(residual + row + at, mask=inside, other=0.0).to(tl.float32)).to(
            x.dtype.element_ty
        )
        tl.store(residual + row + at, values, mask=inside)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide) / DIM + eps)
    scaled = (wide * scale).to(x.dtype.element_ty)
    tl.store(out + row + at, scaled * tl.load(weight + at, mask=inside, other=0.0), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, dependent: bool = False) -> Tensor:
    """Computes x / rms(x) * weight over the last dimension, in float32.

    x: [num_rows, dim] contiguous, weight: [dim] → [num_rows, dim] in x's dtype
    dependent: see dependent_launch
    """
    out = torch.empty_like(x)
    _launch(x, x, weight, out, eps, add=False, dependent=dependent)
    return out


def rms_norm_in_place(x: Tensor, weight: Tensor, eps: float, *, dependent: bool = False) -> None:
    """Normalises x in place, as rms_norm() does.

    x: [num_rows, dim], whose rows need not lie one after another, weight: [dim]
    dependent: see dependent_launch
    """
    _launch(x, x, weight, x, eps, add=False, dependent=dependent)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, dependent: bool = False) -> Tensor:
    """Adds x to the residual stream in place, and returns the normalised sum.

    x, residual: [num_rows, dim] contiguous, weight: [dim] → [num_rows, dim] in x's dtype
    dependent: see dependent_launch
    """
    out = torch.empty_like(x)
    _launch(x, residual, weight, out, eps, add=True, dependent=dependent)
    return out


def _launch(
    x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, eps: float, *, add: bool, dependent: bool
) -> None:
    rows, dim = x.shape
    padded = triton.next_power_of_2(dim)
    if rows:
        _rms_norm[(rows,)](
            x, residual, weight, out, eps, x.stride(0), dim, padded, add, dependent, num_warps=warps_for(padded),
            **launch_options(dependent),
        )  # fmt: skip


def warps_for(elements: int) -> int:
    """Returns the number of warps of a program that processes this many elements at once: 8 to 16 per thread."""
    return min(max(elements // 512, 1), 16)
