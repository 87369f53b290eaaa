"""The gate of a SwiGLU feed-forward layer (Shazeer, 2020). Reference: trunkline_kernels.silu_and_mul."""

import triton
import triton.language as tl
from torch import Tensor

from trunkline_kernels.gpu.dependent_launch import launch_options, wait_for_inputs

BLOCK = 2048  # columns of a program: with it, all programs of 256 rows of 12288 columns fit on 132 multiprocessors


@triton.jit
def _silu_and_mul(
    gate_up,  # [num_rows, 2 * dim], gate first
    out,  # [num_rows, dim]
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: (num_rows, blocks of dim)."""
    wait_for_inputs(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < DIM
    gate = tl.load(gate_up + row * 2 * DIM + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * DIM + DIM + at, mask=inside, other=0.0)
    # Rounded between the two operations, as the reference does.
    activated = (gate / (1 + tl.exp(-gate))).to(up.dtype)
    tl.store(out + row * DIM + at, activated * up, mask=inside)


def silu_and_mul(gate_up: Tensor, *, dependent: bool = False) -> Tensor:
    """Computes silu(gate) * up.

    gate_up: [num_rows, 2 * dim] contiguous, gate first → [num_rows, dim] in its dtype; dependent: see dependent_launch
    """
    rows, both = gate_up.shape
    dim = both // 2
    out = gate_up.new_empty(rows, dim)
    if rows:
        block = min(BLOCK, triton.next_power_of_2(dim))
        _silu_and_mul[(rows, triton.cdiv(dim, block))](
            gate_up, out, dim, block, dependent, num_warps=max(1, block // 512), **launch_options(dependent)
        )
    return out
