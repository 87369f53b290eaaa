"""A feed-forward part of several experts, of which each token uses a few: the reference of all backends."""

import torch
from torch import Tensor
from torch.nn.functional import linear

from trunkline_kernels.expert_routing import Routing
from trunkline_kernels.silu_and_mul import silu_and_mul


def multiply_experts(x: Tensor, routing: Routing, gate_up: Tensor, down: Tensor) -> Tensor:
    """Returns the sum of each token's experts' results, times their shares: [num_tokens, hidden] in x's dtype.

    No token is left out, however many have the same expert. The summands are added in float32 in the order of
    `routing`, so a token's result does not depend on the others.

    x: [num_tokens, hidden]; gate_up: [num_experts, 2 * intermediate, hidden]; down: [num_experts, hidden, intermediate]
    """
    num_tokens, top_k = routing.experts.shape
    results = x.new_empty(num_tokens * top_k, x.shape[1])
    chosen = routing.experts.flatten()
    for expert in torch.unique(chosen).tolist():
        slots = (chosen == expert).nonzero().squeeze(1)
        gated = silu_and_mul(linear(x[slots // top_k], gate_up[expert]))
        results[slots] = linear(gated, down[expert])
    summands = results.view(num_tokens, top_k, -1).float() * routing.shares[..., None]
    total = torch.zeros_like(summands[:, 0])
    for place in range(top_k):
        total += summands[:, place]
    return total.to(x.dtype)
