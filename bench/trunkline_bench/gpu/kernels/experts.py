"""Measures a feed-forward part of experts by the number of rows, against the time to read the weights."""

from functools import partial

import torch
from torch import Tensor

from trunkline_bench.gpu.ceilings import Rows, bandwidth, flops
from trunkline_bench.gpu.shapes import Shapes, median_s
from trunkline_kernels import experts as reference
from trunkline_kernels.gpu.decode_tiling import HOPPER_SHARED_MEMORY
from trunkline_kernels.gpu.expert_choice import route
from trunkline_kernels.gpu.expert_products import FIXED, Weight, expert_tilings, multiply_experts
from trunkline_kernels.quantized_weight import quantize, quantize_blocks

COMPARED_ROWS = 64  # at most: the reference multiplies expert by expert


def measure(shapes: Shapes) -> Rows:
    """A row for each kind of weight and number of rows. `bound_us` is the time to read the weights of the experts that
    the rows chose, or that of the products, whichever is longer; `fixed_us` is with the tiles of --deterministic."""
    rule, hidden, intermediate = shapes.experts, shapes.expert_hidden, shapes.expert_intermediate
    random = partial(torch.randn, device=shapes.device, dtype=shapes.dtype)
    gate_up = random(rule.num_experts * 2 * intermediate, hidden) / hidden**0.5
    down = random(rule.num_experts * hidden, intermediate) / intermediate**0.5
    for kind in ("none", "fp8 in blocks", "int4"):
        weights = _quantized(gate_up, kind), _quantized(down, kind)
        for rows in shapes.expert_rows:
            x, logits = random(rows, hidden), random(rows, rule.num_experts)
            routing = route(logits, rule)
            tilings = expert_tilings(
                rows, top_k=rule.top_k, num_experts=rule.num_experts, weight=weights[1],
                shared_memory=HOPPER_SHARED_MEMORY,
            )  # fmt: skip
            run = partial(multiply_experts, x, routing, *weights)
            time_s, fixed_s, routing_s = (
                median_s(each, shapes.device)
                for each in (partial(run, tilings=tilings), partial(run, tilings=FIXED), partial(route, logits, rule))
            )
            used = len(set(routing.experts.flatten().tolist()))
            read_s = used / rule.num_experts * sum(map(_bytes, weights)) / bandwidth(shapes)
            product_s = 6.0 * rows * rule.top_k * hidden * intermediate / flops(shapes)
            row = {
                "what": f"{rule.num_experts} experts of {hidden} x {intermediate}, {kind}", "rows": rows,
                "experts": used, "us": time_s * 1e6, "fixed_us": fixed_s * 1e6, "routing_us": routing_s * 1e6,
                "bound_us": max(read_s, product_s) * 1e6, "of_bound": max(read_s, product_s) / time_s,
            }  # fmt: skip
            if kind == "none" and rows <= COMPARED_ROWS:
                expected = reference.multiply_experts(
                    x, routing, gate_up.view(rule.num_experts, -1, hidden), down.view(rule.num_experts, hidden, -1)
                )
                worst = (run(tilings=tilings) - expected).abs().max() / expected.abs().max()
                row["difference"] = float(worst)
            yield row


def _quantized(weight: Tensor, kind: str) -> Weight:
    if kind == "none":
        return weight
    return quantize_blocks(weight) if kind == "fp8 in blocks" else quantize(weight, kind)


def _bytes(weight: Weight) -> int:
    return weight.nbytes if isinstance(weight, Tensor) else weight.data.nbytes + weight.scale.nbytes
