"""A feed-forward part of several experts, of which each token uses a few: the reference of all backends."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear

from trunkline_kernels.expert_routing import Routing
from trunkline_kernels.silu_and_mul import silu_and_mul


def multiply_experts(x: Tensor, routing: Routing, gate_up: Tensor, down: Tensor) -> Tensor:
    """multiply_each() with gated experts.

    x: [num_tokens, hidden]; gate_up: [num_experts, 2 * intermediate, hidden]; down: [num_experts, hidden, intermediate]
    """
    return multiply_each(
        x, routing, lambda expert, rows: linear(silu_and_mul(linear(rows, gate_up[expert])), down[expert])
    )


def multiply_each(x: Tensor, routing: Routing, multiply: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Returns the sum of each token's experts' results, times their shares: [num_tokens, hidden] in x's dtype.

    No token is left out, however many have the same expert. The summands are added in float32 in the order of
    `routing`, so a token's result does not depend on the others.

    x: [num_tokens, hidden]; multiply: takes an expert and its tokens' rows of x, and returns its results for them
    """
    num_tokens, top_k = routing.experts.shape
    results = x.new_empty(num_tokens * top_k, x.shape[1])
    chosen = routing.experts.flatten()
    for expert in torch.unique(chosen).tolist():
        slots = (chosen == expert).nonzero().squeeze(1)
        results[slots] = multiply(expert, x[slots // top_k])
    summands = results.view(num_tokens, top_k, -1).float() * routing.shares[..., None]
    total = torch.zeros_like(summands[:, 0])
    for place in range(top_k):
        total += summands[:, place]
    return total.to(x.dtype)
