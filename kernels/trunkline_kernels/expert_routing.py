"""Chooses the experts of each token, and their shares: the reference of all backends.

Sources: top-k of a softmax: Shazeer et al., "Outrageously Large Neural Networks" (2017); Jiang et al., "Mixtral of
Experts" (2024). Sigmoid scores, groups, and a bias for the choice alone: DeepSeek-AI, "DeepSeek-V3 Technical Report"
(2024), section 2.1.2.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from trunkline_kernels.routing_rule import RoutingRule

GROUP_BEST = 2  # a group of experts is as good as the sum of so many of its best
TINY = 1e-20  # keeps the sum of sigmoid scores above 0, as in transformers


class Routing(NamedTuple):
    """The experts of tokens. No token has an expert twice."""

    experts: Tensor  # [num_tokens, top_k] int64, the best first
    shares: Tensor  # [num_tokens, top_k] float32: what the result of each is multiplied by


def route(logits: Tensor, rule: RoutingRule, bias: Tensor | None = None) -> Routing:
    """Chooses the experts of each token. Of equal scores, the one of the expert with the lower index is better.

    logits: [num_tokens, num_experts] float32; bias: [num_experts], added to the scores for the choice alone
    """
    scores = logits.softmax(dim=-1) if rule.scores == "softmax" else logits.sigmoid()
    ranked = scores if bias is None else scores + bias
    if rule.num_groups > 1:
        grouped = ranked.view(len(ranked), rule.num_groups, -1)
        best = _top(grouped.topk(min(GROUP_BEST, grouped.shape[-1])).values.sum(dim=-1), rule.top_groups)
        allowed = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, True)
        ranked = grouped.masked_fill(~allowed[..., None], -torch.inf).flatten(1)
    experts = _top(ranked, rule.top_k)
    shares = scores.gather(1, experts)
    if rule.renormalized:
        shares = shares / (shares.sum(dim=-1, keepdim=True) + (TINY if rule.scores == "sigmoid" else 0.0))
    return Routing(experts, shares * rule.scale)


def _top(scores: Tensor, count: int) -> Tensor:
    """Returns the indices of the `count` highest scores of each row, the lower of two equal ones first."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :count]
