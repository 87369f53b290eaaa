"""Measures the product of --deterministic with several tilings, against the library.

A tiling whose bits are those of the tiling in use may be chosen by the number of rows, and a row still has the same
bits in every batch.
"""

from dataclasses import asdict
from functools import partial

import torch
from torch.nn.functional import linear

from trunkline_bench.gpu.ceilings import Rows
from trunkline_bench.gpu.shapes import Shapes, median_s
from trunkline_kernels.gpu.fixed_matmul import TILINGS, fixed_linear
from trunkline_kernels.gpu.matmul_tiling import MatmulTiling
from trunkline_worker.model.config_json import read_spec

CANDIDATES = (*TILINGS, MatmulTiling(256, 128, 64, 8, 3))


def measure(shapes: Shapes) -> Rows:
    """A row for each product of a layer, number of rows and tiling."""
    for product in read_spec(shapes.model).layers[0].products:
        weight = torch.randn(product.columns, product.inner, device=shapes.device).to(shapes.dtype)
        for rows in shapes.product_rows:
            x = torch.randn(rows, product.inner, device=shapes.device).to(shapes.dtype)
            library_s = median_s(partial(linear, x, weight), shapes.device)
            expected = fixed_linear(x, weight)  # with the tiling that every device has
            for tiling in CANDIDATES[: 2 if shapes.tiny else None]:
                run = partial(fixed_linear, x, weight, tilings=[tiling])
                time_s = median_s(run, shapes.device)
                yield {
                    "what": f"{product.columns} x {product.inner}", "rows": rows,
                    **{f"tile_{name}": value for name, value in asdict(tiling).items()},
                    "us": time_s * 1e6, "of_library": library_s / time_s, "same_bits": torch.equal(run(), expected),
                }  # fmt: skip
