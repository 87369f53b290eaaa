"""Root mean square layer normalisation (Zhang and Sennrich, 2019)."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Computes x / rms(x) * weight over the last dimension, in float32.

    x: [..., dim], weight: [dim] → [..., dim] in x's dtype
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Adds x to the residual stream, and returns (normalised sum, sum). Shapes as in rms_norm."""
    residual = residual + x
    return rms_norm(residual, weight, eps), residual
