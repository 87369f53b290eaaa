"""A feed-forward part of experts on a GPU."""

from torch import Tensor
from torch.nn.functional import linear

from trunkline_kernels.gpu.expert_choice import route
from trunkline_kernels.gpu.expert_products import expert_tilings, multiply_experts
from trunkline_kernels.gpu.fixed_matmul import fixed_linear
from trunkline_worker.model.gpu_weight import GpuWeight
from trunkline_worker.model.weights import ExpertsWeights, Linear


def feed_to_experts(
    w: ExpertsWeights[GpuWeight], x: Tensor, *, kv_slots: Tensor | None, loads: Tensor, shared_memory: int
) -> Tensor:
    """Returns the sum of the results of each token's experts: [num_tokens, hidden]. Padding has no experts but a shared
    one.

    x: [num_tokens, hidden]; kv_slots: as DeviceBatch has them; None: there is no padding
    loads: [num_experts] int64, to which the tokens of each expert are added
    shared_memory: bytes of a program
    """
    fixed, dependent, down = w.down.fixed, w.down.dependent, w.down.weight

    def multiply(product: Linear) -> Tensor:
        if fixed:
            return fixed_linear(x, product.weight, product.bias, tilings=fixed)
        return linear(x, product.weight, product.bias)

    routing = route(multiply(w.router), w.rule, kv_slots=kv_slots, dependent=dependent)
    tilings = expert_tilings(
        len(x),
        top_k=w.rule.top_k,
        num_experts=w.rule.num_experts,
        weight=down,
        shared_memory=shared_memory,
        fixed=bool(fixed),
    )
    fed = multiply_experts(x, routing, w.gate_up.weight, down, tilings=tilings, loads=loads, dependent=dependent)
    if w.shared is not None:
        shared = w.shared.down.multiply(w.shared.gate_up.multiply_gated(x))
        fed += shared if w.shared_gate is None else shared * multiply(w.shared_gate).sigmoid()
    return fed
