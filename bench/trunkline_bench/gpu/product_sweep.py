"""How fast a layer's products are by the number of rows, and whether a kernel of our own would be faster for gate and
up."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial

import torch
from torch.nn.functional import linear
from triton.runtime.errors import OutOfResources

from trunkline_bench.gpu.ceilings import Rows
from trunkline_bench.gpu.shapes import Shapes, median_s
from trunkline_kernels.gpu.gated_linear import GatedTiling, gated_linear
from trunkline_kernels.gpu.silu_and_mul import silu_and_mul
from trunkline_worker.model.spec import read_spec

# Each compiles for sm_90 without spills (tiling_resources). Few rows need tiles of few rows.
GATED_CANDIDATES = (
    GatedTiling(16, 64, 64, 4, 4), GatedTiling(64, 64, 64, 4, 4), GatedTiling(64, 128, 64, 8, 3),
    GatedTiling(128, 64, 64, 8, 4), GatedTiling(128, 128, 64, 8, 3),
)  # fmt: skip
TINY = (GatedTiling(16, 16, 16, 4, 1),)


def measure(shapes: Shapes) -> Rows:
    """A row per product and number of rows; for gate and up, one more per candidate: both products and the gate."""
    spec = read_spec(shapes.model)
    hidden, intermediate = spec.hidden_size, spec.intermediate_size
    packed = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    matrices = {
        "qkv": (packed, hidden), "output": (hidden, spec.num_heads * spec.head_dim),
        "gate and up": (2 * intermediate, hidden), "down": (hidden, intermediate),
    }  # fmt: skip
    for name, (columns, inner) in matrices.items():
        weight = torch.randn(columns, inner, device=shapes.device).to(shapes.dtype)
        for rows in shapes.product_rows:
            x = torch.randn(rows, inner, device=shapes.device).to(shapes.dtype)
            time_s = median_s(partial(linear, x, weight), shapes.device)
            yield {
                "what": f"product, {name}", "rows": rows, "us": time_s * 1e6,
                "tflop_per_s": 2 * rows * columns * inner / time_s / 1e12,
                "gb_per_s": shapes.dtype.itemsize * (columns * inner + rows * (columns + inner)) / time_s / 1e9,
            }  # fmt: skip
            if name == "gate and up":
                yield from _gated(shapes, x, weight, TINY if shapes.tiny else GATED_CANDIDATES)


def _gated(shapes: Shapes, x: torch.Tensor, weight: torch.Tensor, candidates: Sequence[GatedTiling]) -> Rows:
    """Against the library's product and the gate's own kernel."""
    library_s = median_s(lambda: silu_and_mul(linear(x, weight)), shapes.device)
    yield {"what": "gated, library", "rows": len(x), "us": library_s * 1e6}
    for tiling in candidates:
        try:
            time_s = median_s(partial(gated_linear, x, weight, tiling), shapes.device)
        except OutOfResources as error:
            yield {"what": "gated, own", "rows": len(x), **_named(tiling), "failed": str(error)}
            continue
        yield {
            "what": "gated, own", "rows": len(x), **_named(tiling), "us": time_s * 1e6,
            "of_library": library_s / time_s,
        }  # fmt: skip


def _named(tiling: GatedTiling) -> dict[str, int]:
    return {f"tile_{name}": value for name, value in asdict(tiling).items()}
