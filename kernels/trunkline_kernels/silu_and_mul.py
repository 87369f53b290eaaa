"""The gate of a SwiGLU feed-forward layer (Shazeer, 2020)."""

from torch import Tensor
from torch.nn.functional import silu


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Computes silu(gate) * up. gate_up: [..., 2 * dim], gate first → [..., dim]"""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up
