"""Rotary position embedding (Su et al., 2021), in the half-split layout of Hugging Face checkpoints."""

from torch import Tensor, cat


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (x[..., i], x[..., i + head_dim / 2]) by the angles of cos and sin.

    x: [num_tokens, num_heads, head_dim], cos and sin: [num_tokens, head_dim / 2] float32 → like x
    """
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
