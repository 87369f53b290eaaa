"""Measures products with int8 and int4 weights: by our kernel, and by the library with the weight in 16 bits."""

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from trunkline_bench.gpu.ceilings import Rows
from trunkline_bench.gpu.shapes import Shapes, median_s
from trunkline_kernels.gpu.quantized_linear import quantized_linear
from trunkline_kernels.gpu.widening import widened
from trunkline_kernels.quantized_weight import QuantizedWeight, quantize
from trunkline_worker.model.config_json import read_spec


def measure(shapes: Shapes) -> Rows:
    """A row for the largest product of a layer by kind of weight and number of rows. `widened_us` includes the time in
    which the weight is written in 16 bits."""
    product = max(read_spec(shapes.model).layers[0].products, key=lambda each: each.columns * each.inner)
    weight = torch.randn(product.columns, product.inner, device=shapes.device).to(shapes.dtype)
    for kind in ("int8", "int4"):
        narrow = quantize(weight, kind)
        for rows in shapes.weight_only_rows:
            x = torch.randn(rows, product.inner, device=shapes.device).to(shapes.dtype)
            own_s, library_s, widened_s = (
                median_s(run, shapes.device)
                for run in (
                    partial(quantized_linear, x, narrow),
                    partial(linear, x, weight),
                    partial(_through_library, x, narrow),
                )
            )
            yield {
                "what": f"{kind}, {product.columns} x {product.inner}", "rows": rows, "own_us": own_s * 1e6,
                "widened_us": widened_s * 1e6, "bfloat16_us": library_s * 1e6,
                "of_bfloat16": library_s / min(own_s, widened_s),
            }  # fmt: skip


def _through_library(x: Tensor, weight: QuantizedWeight) -> Tensor:
    return linear(x, widened(weight, x.dtype))
