"""Chooses the experts of each token. Reference: trunkline_kernels.expert_routing.route."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trunkline_kernels.expert_routing import TINY, Routing
from trunkline_kernels.gpu.dependent_launch import launch_options, wait_for_inputs
from trunkline_kernels.gpu.sampling_tiles import order_of
from trunkline_kernels.routing_rule import RoutingRule

_TINY = tl.constexpr(TINY)
WARP_EXPERTS = 256  # of which one warp chooses


@triton.jit
def _key(score, index):
    """Returns int64 numbers above 0 that order like the scores. Of equal scores, the lower index has the larger one."""
    return (order_of(score).to(tl.int64) << 31) | (2147483647 - index)


@triton.jit
def _choose_experts(
    logits,  # [num_tokens, GROUPS * MEMBERS]
    bias,  # [GROUPS * MEMBERS] float32; not read unless BIAS
    kv_slots,  # [num_tokens] int64: negative for padding; not read unless PADDING
    experts,  # [num_tokens, TOP_K] int32 ← GROUPS * MEMBERS for padding
    shares,  # [num_tokens, TOP_K] float32 ←
    scale,
    SOFTMAX: tl.constexpr,  # else sigmoid
    BIAS: tl.constexpr,
    PADDING: tl.constexpr,
    RENORMALIZED: tl.constexpr,
    GROUPS: tl.constexpr,
    MEMBERS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP_K: tl.constexpr,
    # The same numbers, padded to powers of two.
    PADDED_GROUPS: tl.constexpr,
    PADDED_MEMBERS: tl.constexpr,
    PADDED_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Grid: (num_tokens)."""
    wait_for_inputs(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, PADDED_GROUPS), tl.arange(0, PADDED_MEMBERS)
    index = group[:, None] * MEMBERS + member[None, :]
    there = (group < GROUPS)[:, None] & (member < MEMBERS)[None, :]
    x = tl.load(logits + token * (GROUPS * MEMBERS) + index, mask=there, other=float("-inf")).to(tl.float32)
    if SOFTMAX:
        weights = tl.exp(x - tl.max(x))
        scores = weights / tl.sum(weights)
    else:
        scores = 1 / (1 + tl.exp(-x))
    ranked = scores
    if BIAS:
        ranked += tl.load(bias + index, mask=there, other=0.0)
    ranked = tl.where(ranked == ranked, ranked, float("inf"))  # NaN is the best, as torch sorts it
    ranked = tl.where(there, ranked, float("-inf"))
    key = tl.where(there, _key(ranked, index), 0)
    if GROUPS > 1:
        merit = tl.max(ranked, axis=1)
        if MEMBERS > 1:
            is_best = key == tl.max(key, axis=1)[:, None]
            merit += tl.max(tl.where(is_best, float("-inf"), ranked), axis=1)
        group_key = tl.where(group < GROUPS, _key(merit, group), 0)
        allowed = group < 0
        for _ in tl.static_range(TOP_GROUPS):
            is_best_group = group_key == tl.max(group_key)
            allowed |= is_best_group
            group_key = tl.where(is_best_group, 0, group_key)
        key = tl.where(there, _key(tl.where(allowed[:, None], ranked, float("-inf")), index), 0)
    place = tl.arange(0, PADDED_K)
    chosen = tl.zeros([PADDED_K], tl.int32)
    share = tl.zeros([PADDED_K], tl.float32)
    for at in tl.static_range(TOP_K):
        best = tl.max(key)
        chosen = tl.where(place == at, (2147483647 - (best & 2147483647)).to(tl.int32), chosen)
        share = tl.where(place == at, tl.sum(tl.where(key == best, scores, 0.0)), share)
        key = tl.where(key == best, 0, key)
    if RENORMALIZED:
        share /= tl.sum(share) + (0.0 if SOFTMAX else _TINY)
    share *= scale
    if PADDING:
        is_padding = tl.load(kv_slots + token) < 0
        chosen = tl.where(is_padding, GROUPS * MEMBERS, chosen)
        share = tl.where(is_padding, 0.0, share)
    tl.store(experts + token * TOP_K + place, chosen, mask=place < TOP_K)
    tl.store(shares + token * TOP_K + place, share, mask=place < TOP_K)


def route(
    logits: Tensor,
    rule: RoutingRule,
    bias: Tensor | None = None,
    *,
    kv_slots: Tensor | None = None,
    dependent: bool = False,
) -> Routing:
    """Chooses the experts of each token, as the reference does. Padding has no expert: the number of experts stands in
    the place of each of its experts, and its shares are 0.

    logits: [num_tokens, num_experts] contiguous; bias: [num_experts] float32
    kv_slots: [num_tokens] int64, negative for padding; None: there is none
    dependent: see dependent_launch
    """
    num_tokens = len(logits)
    experts = torch.empty(num_tokens, rule.top_k, dtype=torch.int32, device=logits.device)
    shares = torch.empty(num_tokens, rule.top_k, dtype=torch.float32, device=logits.device)
    groups, members = rule.num_groups, rule.num_experts // rule.num_groups
    padded = triton.next_power_of_2(groups), triton.next_power_of_2(members)
    if num_tokens:
        _choose_experts[(num_tokens,)](
            logits, logits if bias is None else bias, logits if kv_slots is None else kv_slots, experts, shares,
            rule.scale, rule.scores == "softmax", bias is not None, kv_slots is not None, rule.renormalized, groups,
            members, rule.top_groups, rule.top_k, *padded, triton.next_power_of_2(rule.top_k), dependent,
            num_warps=1 if padded[0] * padded[1] <= WARP_EXPERTS else 4, **launch_options(dependent),
        )  # fmt: skip
    return Routing(experts, shares)
