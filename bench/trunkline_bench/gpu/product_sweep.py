"""How fast a layer's products are by the number of rows, and whether a kernel of our own would be faster for gate and
up. Which way is faster is written into the table that engines read: see gated_choice.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import version

import torch
from torch import Tensor
from torch.nn.functional import linear
from triton.runtime.errors import OutOfResources

from trunkline_bench.gpu.ceilings import Rows
from trunkline_bench.gpu.shapes import Shapes, median_s
from trunkline_bench.gpu.tiling_sweep import FILE
from trunkline_kernels.gpu import tuned_tilings
from trunkline_kernels.gpu.gated_choice import LEAST_GAIN
from trunkline_kernels.gpu.gated_linear import GatedTiling, gated_linear
from trunkline_kernels.gpu.silu_and_mul import silu_and_mul
from trunkline_kernels.gpu.tuned_tilings import GATED, ProductKey, name_of
from trunkline_worker.model.gpu_decoder import Chip
from trunkline_worker.model.spec import read_spec

# Each compiles for sm_90 without spills (tiling_resources). Few rows need tiles of few rows.
GATED_CANDIDATES = (
    GatedTiling(16, 32, 128, 4, 5), GatedTiling(16, 64, 64, 4, 6), GatedTiling(64, 64, 64, 4, 4),
    GatedTiling(64, 128, 64, 8, 4), GatedTiling(128, 64, 64, 4, 3), GatedTiling(128, 64, 64, 8, 4),
    GatedTiling(128, 128, 64, 8, 4), GatedTiling(256, 64, 64, 8, 3),
)  # fmt: skip
TINY = (GatedTiling(16, 16, 16, 4, 1),)


def measure(shapes: Shapes) -> Rows:
    """A row per product and number of rows; for gate and up, one more per candidate: both products and the gate."""
    spec = read_spec(shapes.model)
    hidden, intermediate = spec.hidden_size, spec.intermediate_size
    packed = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    # Gate and up first: their rows are what an engine uses.
    matrices = {
        "gate and up": (2 * intermediate, hidden), "qkv": (packed, hidden),
        "output": (hidden, spec.num_heads * spec.head_dim), "down": (hidden, intermediate),
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


def _gated(shapes: Shapes, x: Tensor, weight: Tensor, candidates: Sequence[GatedTiling]) -> Rows:
    """Against the library's product and the gate's own kernel. The winner is in the table afterwards."""
    chip = Chip.of(shapes.device)
    library_s = median_s(lambda: silu_and_mul(linear(x, weight)), shapes.device)
    yield {"what": "gated, library", "rows": len(x), "us": library_s * 1e6}
    times_s: dict[GatedTiling, float] = {}
    for tiling in candidates:
        try:
            run = partial(gated_linear, x, weight, tiling, dependent=chip.dependent_launches)
            times_s[tiling] = median_s(run, shapes.device)
        except OutOfResources as error:
            yield {"what": "gated, own", "rows": len(x), **_named(tiling), "failed": str(error)}
            continue
        yield {
            "what": "gated, own", "rows": len(x), **_named(tiling), "us": times_s[tiling] * 1e6,
            "of_library": library_s / times_s[tiling],
        }  # fmt: skip
    best = winner(library_s, times_s)
    columns, inner = len(weight) // 2, weight.shape[1]
    key = ProductKey(GATED, chip.name, len(x), columns, inner, name_of(x.dtype))
    own_s = min(times_s.values(), default=math.inf)
    measured = {"library_us": round(library_s * 1e6, 1), "own_us": round(own_s * 1e6, 1)}
    versions = {name: version(name) for name in ("torch", "triton")}
    fields = {} if best is None else asdict(best)
    tuned_tilings.write(shapes.output / FILE, {key: (fields, {**measured, **versions})})
    yield {"what": "gated, chosen", "rows": len(x), "own": best is not None}


def winner(library_s: float, times_s: dict[GatedTiling, float]) -> GatedTiling | None:
    """The fastest tiling, if it is faster than the library by more than chance may be."""
    best = min(times_s, key=lambda tiling: times_s[tiling], default=None)
    return best if best is not None and times_s[best] * LEAST_GAIN < library_s else None


def _named(tiling: GatedTiling) -> dict[str, int]:
    return {f"tile_{name}": value for name, value in asdict(tiling).items()}
