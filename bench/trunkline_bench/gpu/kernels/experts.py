"""Measures a feed-forward part of experts by the number of rows, against the time to read the weights."""

from functools import partial

import torch
from torch import Tensor

from trunkline_bench.gpu.ceilings import Rows, bandwidth, flops
from trunkline_bench.gpu.shapes import Shapes, median_s
from trunkline_kernels import experts as reference
from trunkline_kernels.gpu.expert_choice import route
from trunkline_kernels.gpu.expert_products import (
    BY_ROWS,
    FIXED,
    MANY_ROWS,
    WIDE,
    ExpertWeight,
    expert_tilings,
    multiply_experts,
)
from trunkline_kernels.quantized_weight import dequantize, quantize, quantize_blocks
from trunkline_worker.model.gpu_decoder import FP8_CAPABILITY, Chip

IN_BLOCKS = "fp8 in blocks"
# Of the largest value, by the kind of weights; activations are rounded to 8 bits, too, if those are fp8.
TOLERANCE = {"none": 2e-2, "int4": 2e-2, IN_BLOCKS: 1e-1}
TRIED = (FIXED, BY_ROWS[0][1], BY_ROWS[1][1], MANY_ROWS, WIDE)
COMPARED_ROWS = 64  # at most: the reference multiplies expert by expert


def measure(shapes: Shapes) -> Rows:
    """A row for each kind of weight and number of rows. `bound_us` is the time to read the weights of the experts that
    the rows chose, or that of the products, whichever is longer; `us_by_tile` is with each tiling of the down product.

    Raises AssertionError if results differ from the reference, or with dependent launches."""
    rule, hidden, intermediate = shapes.experts, shapes.expert_hidden, shapes.expert_intermediate
    chip = Chip.of(shapes.device)
    random = partial(torch.randn, device=shapes.device, dtype=shapes.dtype)
    gate_up = random(rule.num_experts * 2 * intermediate, hidden) / hidden**0.5
    down = random(rule.num_experts * hidden, intermediate) / intermediate**0.5
    for kind in TOLERANCE:
        if kind == IN_BLOCKS and shapes.device.type == "cuda" and chip.capability < FP8_CAPABILITY:
            continue
        weights = _quantized(gate_up, kind), _quantized(down, kind)
        for rows in shapes.expert_rows:
            x, logits = random(rows, hidden), random(rows, rule.num_experts)
            routing = route(logits, rule)
            tilings = expert_tilings(
                rows, top_k=rule.top_k, num_experts=rule.num_experts, weight=weights[1],
                shared_memory=chip.shared_memory,
            )  # fmt: skip
            run = partial(multiply_experts, x, routing, *weights, tilings=tilings)
            row: dict[str, object] = {
                "what": f"{rule.num_experts} experts of {hidden} x {intermediate}, {kind}", "rows": rows
            }  # fmt: skip
            # The interpreter rounds to 8 bits differently than devices.
            if rows <= COMPARED_ROWS and not (shapes.tiny and kind == IN_BLOCKS):
                found, again = run(), run(dependent=chip.dependent_launches)
                assert torch.equal(found, again), f"{kind}, {rows} rows: bits differ with dependent launches"
                gates, downs = (
                    _values(each, shapes.dtype).view(rule.num_experts, -1, each_inner)
                    for each, each_inner in zip(weights, (hidden, intermediate), strict=True)
                )
                expected = reference.multiply_experts(x, routing, gates, downs)
                worst = float((found - expected).abs().max() / expected.abs().max())
                assert worst < TOLERANCE[kind], f"{kind}, {rows} rows: differs by {worst} of the largest value"
                row["difference"] = worst
            used = len(set(routing.experts.flatten().tolist()))
            read_s = used / rule.num_experts * sum(map(_bytes, weights)) / bandwidth(shapes)
            bound_s = max(read_s, 6.0 * rows * rule.top_k * hidden * intermediate / flops(shapes))
            time_s = median_s(run, shapes.device)
            yield row | {
                "experts": used, "us": time_s * 1e6, "bound_us": bound_s * 1e6, "of_bound": bound_s / time_s,
                "us_by_tile": {
                    f"{each.down.rows} x {each.down.columns}": median_s(partial(run, tilings=each), shapes.device) * 1e6
                    for each in TRIED[: 1 if shapes.tiny else None]
                    if each != WIDE or tilings == WIDE  # not every device and weight takes it
                },
                "routing_us": median_s(partial(route, logits, rule), shapes.device) * 1e6,
            }  # fmt: skip


def _quantized(weight: Tensor, kind: str) -> ExpertWeight:
    if kind == "none":
        return weight
    return quantize_blocks(weight) if kind == IN_BLOCKS else quantize(weight, kind)


def _values(weight: ExpertWeight, dtype: torch.dtype) -> Tensor:
    return weight if isinstance(weight, Tensor) else dequantize(weight).to(dtype)


def _bytes(weight: ExpertWeight) -> int:
    return weight.nbytes if isinstance(weight, Tensor) else weight.data.nbytes + weight.scale.nbytes
