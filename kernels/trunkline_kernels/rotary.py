"""Rotary position embedding (Su et al., 2021), in the half-split layout of Hugging Face checkpoints."""

from torch import Tensor, cat, split


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (x[..., i], x[..., i + num_pairs]) by the angles of cos and sin. What is behind them stays.

    x: [num_tokens, num_heads, head_dim], cos and sin: [num_tokens, num_pairs] float32 → like x
    """
    pairs = cos.shape[-1]
    first, second, rest = split(x.float(), [pairs, pairs, x.shape[-1] - 2 * pairs], dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).to(x.dtype)
