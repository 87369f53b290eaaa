"""Experts on a CPU: each expert's tokens times its rearranged weights, all experts in one call."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from trunkline_kernels.cpu.packed_linear import GroupedLinear, PackedLinear
from trunkline_kernels.expert_routing import Routing
from trunkline_kernels.expert_routing import route as route_any
from trunkline_kernels.routing_rule import RoutingRule


class PackedExperts:
    """Computes what expert_routing.route() and experts.multiply_experts() compute, with no more rows than tokens times
    top_k. A token's result is the same to the bit whatever the other tokens are."""

    __slots__ = ("_down", "_gate_up", "_kernels", "_room", "_rule", "_values")

    def __init__(
        self, kernels: ctypes.CDLL, rule: RoutingRule, gate_up: Sequence[PackedLinear], down: Sequence[PackedLinear]
    ) -> None:
        """kernels: those for the dtype of x; gate_up, down: of each expert"""
        self._kernels, self._rule = kernels, rule
        self._gate_up, self._down = GroupedLinear(gate_up), GroupedLinear(down)
        # Gate and up, their product, and the result, of each pair of a token and an expert.
        self._values = self._gate_up.out + self._gate_up.out // 2 + self._down.out
        self._room = max(self._gate_up.room, self._down.room)

    def multiply(self, x: Tensor, logits: Tensor, *, loads: Tensor | None = None, num_padding: int = 0) -> Tensor:
        """x: [num_tokens, hidden]; logits: [num_tokens, num_experts] of the router, in x's dtype; both contiguous →
        [num_tokens, hidden] in x's dtype

        loads: [num_experts] int64, to which the tokens of each expert are added, without the last num_padding rows
        """
        experts, shares = self.route(logits)
        (num_tokens, top_k), num_pairs = experts.shape, experts.numel()
        indices = experts.new_empty(self._rule.num_experts + 1 + 2 * num_pairs)
        space, out = x.new_empty(num_pairs * self._values), torch.empty_like(x)
        arranged = torch.empty(num_pairs * self._room, dtype=torch.float32)
        counted, counts = (0, None) if loads is None else (num_tokens - num_padding, loads.data_ptr())
        self._kernels.multiply_experts(
            x.data_ptr(), experts.data_ptr(), shares.data_ptr(), ctypes.byref(self._gate_up.arguments),
            ctypes.byref(self._down.arguments), counts, indices.data_ptr(), space.data_ptr(), arranged.data_ptr(),
            out.data_ptr(), num_tokens, counted, top_k,
        )  # fmt: skip
        return out

    def route(self, logits: Tensor) -> Routing:
        rule = self._rule
        if rule.scores != "softmax" or rule.num_groups > 1:
            experts, shares = route_any(logits.float(), rule)
            return Routing(experts.contiguous(), shares.contiguous())
        experts = torch.empty(len(logits), rule.top_k, dtype=torch.int64)
        shares = torch.empty(len(logits), rule.top_k, dtype=torch.float32)
        self._kernels.route(
            logits.data_ptr(), experts.data_ptr(), shares.data_ptr(), len(logits), rule.num_experts, rule.top_k,
            rule.renormalized, rule.scale,
        )  # fmt: skip
        return Routing(experts, shares)
