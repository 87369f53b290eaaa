"""Measures a layer's products of 8-bit floats by number of rows, through the library and through our kernels, and
writes the faster way into the table that engines read (product_choice).
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from trunkline_bench.gpu.ceilings import Rows
from trunkline_bench.gpu.kernels.tiling_sweep import FILE
from trunkline_bench.gpu.shapes import Shapes, median_s
from trunkline_kernels.gpu import tuned_tilings
from trunkline_kernels.gpu.persistent_linear import NEVER, PersistentTiling, ProductRoom, division_of, is_offered
from trunkline_kernels.gpu.product_choice import LEAST_GAIN, WEIGHT_TYPES, ProductChoice, ProductTiling
from trunkline_kernels.gpu.quantized_linear import Fp8Tiling, fp8_tiling
from trunkline_kernels.gpu.tuned_tilings import GATED, LINEAR, ProductKey
from trunkline_kernels.quantized_weight import BLOCK, QuantizedWeight, dequantize, quantize, quantize_blocks
from trunkline_worker.model.config_json import read_spec
from trunkline_worker.model.gpu_decoder import FP8_CAPABILITY, Chip
from trunkline_worker.model.gpu_weight import GpuWeight, timed_products

# All compile for sm_90 without spills (tiling_resources), also with Triton 3.6.
GATED_CANDIDATES = (
    PersistentTiling(64, 64, 128, 4, 4, 2), PersistentTiling(64, 64, 256, 4, 4, 1),
    PersistentTiling(64, 128, 128, 4, 5, 1), PersistentTiling(128, 64, 128, 8, 4, 1),
    PersistentTiling(128, 128, 128, 8, 4, 1), PersistentTiling(256, 32, 128, 8, 4, 1),
)  # fmt: skip
CANDIDATES = (
    PersistentTiling(64, 64, 256, 4, 3, 2), PersistentTiling(64, 128, 128, 4, 4, 2),
    PersistentTiling(64, 128, 256, 4, 4, 1), PersistentTiling(128, 64, 128, 8, 6, 1),
    PersistentTiling(128, 128, 128, 8, 4, 1), PersistentTiling(256, 64, 128, 8, 4, 1),
)  # fmt: skip
# Of weights in blocks: a tile is at most as wide as a block.
GATED_BLOCK_CANDIDATES = (
    PersistentTiling(64, 32, BLOCK, 4, 4, 2), PersistentTiling(64, 64, BLOCK, 4, 4, 2),
    PersistentTiling(64, 128, BLOCK, 4, 4, 1), PersistentTiling(128, 64, BLOCK, 8, 4, 1),
    PersistentTiling(128, 128, BLOCK, 8, 3, 1), PersistentTiling(256, 64, BLOCK, 8, 3, 1),
)  # fmt: skip
BLOCK_CANDIDATES = (
    PersistentTiling(64, 32, BLOCK, 4, 6, 2), PersistentTiling(64, 64, BLOCK, 4, 4, 3),
    PersistentTiling(64, 128, BLOCK, 4, 4, 2), PersistentTiling(128, 64, BLOCK, 4, 4, 2),
    PersistentTiling(128, 128, BLOCK, 8, 4, 1),
)  # fmt: skip
TINY = Fp8Tiling(16, 128, 64, 4, 1)
TINY_PERSISTENT = PersistentTiling(16, 64, 64, 4, 1, 1)
MOST_DIFFERENCE = 0.02  # of the largest value: sums are rounded to 16 bits, and added in another order
FEWEST_TILE_ROWS = 64  # of a tile on tensor cores of capability 9.0


def measure(shapes: Shapes) -> Rows:
    """Rows for the library, each candidate and the choice, by product and number of rows. Writes the winners to the
    table. The times include rounding the activations."""
    yield from _swept(shapes, partial(quantize, kind="fp8"), shapes.product_rows)


def measure_blocks(shapes: Shapes) -> Rows:
    """The same with weights in blocks. The library's time is that of a weight with a scale per column, so that
    `of_library` is what blocks cost; the fastest candidate is written even if it is slower."""
    yield from _swept(shapes, quantize_blocks, shapes.block_product_rows)


def _swept(shapes: Shapes, form: Callable[[Tensor], QuantizedWeight], numbers_of_rows: Iterable[int]) -> Rows:
    if not shapes.tiny and Chip.of(shapes.device).capability < FP8_CAPABILITY:
        yield {"what": "fp8 products", "offered": False}
        return
    layer = read_spec(shapes.model).layers[0]
    qkv, output, gate_up, down = zip(timed_products(layer), layer.products, strict=True)
    # Gate and up first: they take most of a step's product time.
    products = {"gate and up": gate_up, "down": down, "qkv": qkv, "output": output}
    for name, ((kernel, _, inner), linear) in products.items():
        weight = form(torch.randn(linear.columns, inner, device=shapes.device))
        for rows in numbers_of_rows:
            x = torch.randn(rows, inner, device=shapes.device).to(shapes.dtype)
            yield from _compared(name, kernel, shapes, x, weight)


def candidates(kernel: str, rows: int, *, persistent: bool, in_blocks: bool = False) -> list[ProductTiling]:
    """Tilings that may be the fastest for this number of rows. `persistent`: include those of persistent kernels."""
    some: tuple[PersistentTiling, ...] = ()
    if persistent and kernel == GATED:
        some = GATED_BLOCK_CANDIDATES if in_blocks else GATED_CANDIDATES
    elif persistent:
        some = BLOCK_CANDIDATES if in_blocks else CANDIDATES
    # A tile with at least twice as many rows as the product wastes half of its results.
    kept = [tiling for tiling in some if tiling.rows <= FEWEST_TILE_ROWS or tiling.rows < 2 * rows]
    return [fp8_tiling(rows), *kept]


def ways(tiling: ProductTiling, rows: int, columns: int, inner: int, chip: Chip) -> list[ProductTiling]:
    """The tiling, and if it would split tiles, also a variant with whole tiles.  columns: of the result"""
    if not isinstance(tiling, PersistentTiling):
        return [tiling]
    whole = replace(tiling, least_saved=NEVER)
    divisions = [
        division_of(
            tiles=-(-rows // each.rows) * -(-columns // each.columns), steps=-(-inner // each.inner),
            programs=chip.num_multiprocessors * each.programs, least_saved=each.least_saved,
        )
        for each in (tiling, whole)
    ]  # fmt: skip
    return [tiling] if divisions[0] == divisions[1] else [tiling, whole]


def _compared(name: str, kernel: str, shapes: Shapes, x: Tensor, weight: QuantizedWeight) -> Rows:
    """Compares candidates with the library (the gate is a separate kernel there). Writes the winner to the table."""
    chip, matrix = Chip.of(shapes.device), weight.data
    columns, inner = len(matrix) // 2 if kernel == GATED else len(matrix), matrix.shape[1]
    offered = is_offered(chip.capability, is_nvidia=torch.version.hip is None)
    dtype = WEIGHT_TYPES[weight.in_blocks]
    tilings = candidates(kernel, len(x), persistent=offered, in_blocks=weight.in_blocks)
    tilings = [each for tiling in tilings for each in ways(tiling, len(x), columns, inner, chip)]
    if shapes.tiny:
        tilings = [TINY, TINY_PERSISTENT]
        if weight.in_blocks:
            tilings = [replace(tiling, inner=BLOCK) for tiling in tilings]
    room = ProductRoom.allocate(
        [tiling for tiling in tilings if isinstance(tiling, PersistentTiling)],
        multiprocessors=chip.num_multiprocessors, device=shapes.device,
    )  # fmt: skip
    of_library = quantize(dequantize(weight), "fp8") if weight.in_blocks else weight
    library = product(kernel, None, x, of_library, room, dependent=chip.dependent_launches)
    # Without a table, a product with a weight in blocks is quantized_linear's.
    expected = product(kernel, None, x, weight, room, dependent=chip.dependent_launches)().clone()
    library_s = median_s(library, shapes.device)
    yield {
        "what": f"{name}, library", "dtype": dtype, "rows": len(x), "us": library_s * 1e6,
        "tflop_per_s": 2 * len(x) * matrix.numel() / library_s / 1e12,
        "gb_per_s": (matrix.nbytes + x.nbytes + expected.nbytes) / library_s / 1e9,
    }  # fmt: skip
    times_s: dict[ProductTiling, float] = {}
    for tiling in tilings:
        shown = {"what": f"{name}, {_kind(tiling)}", "dtype": dtype, "rows": len(x), **_named(tiling)}
        try:
            run = product(kernel, tiling, x, weight, room, dependent=chip.dependent_launches)
            difference = float((run() - expected).abs().max() / expected.abs().max())
            if not difference < MOST_DIFFERENCE:
                yield {**shown, "failed": f"differs from the library by {difference} of the largest value"}
                continue
            times_s[tiling] = median_s(run, shapes.device)
        except OutOfResources as error:
            yield {**shown, "failed": str(error)}
            continue
        yield {**shown, "us": times_s[tiling] * 1e6, "of_library": library_s / times_s[tiling]}
    best = winner(math.inf if weight.in_blocks else library_s, times_s)
    key = ProductKey(kernel, chip.name, len(x), columns, inner, dtype)
    own_s = min(times_s.values(), default=math.inf)
    measured = {"library_us": round(library_s * 1e6, 1), "own_us": round(own_s * 1e6, 1)}
    versions = {name: version(name) for name in ("torch", "triton")}
    fields = {} if best is None else asdict(best)
    tuned_tilings.write(shapes.output / FILE, {key: (fields, {**measured, **versions})})
    kind = "library" if best is None else _kind(best)
    yield {"what": f"{name}, chosen", "dtype": dtype, "rows": len(x), "kernel": kind}


def product(
    kernel: str, tiling: ProductTiling | None, x: Tensor, weight: QuantizedWeight, room: ProductRoom, *, dependent: bool
) -> Callable[[], Tensor]:
    """A product as an engine launches it; without a tiling, through the library.

    The callable returns the result; for ADDED, the residual after all calls so far, or this call's product if it is not
    added yet.
    """
    launched = GpuWeight(weight, None, ProductChoice((len(x),), (tiling,)), room, (), dependent)
    if kernel == GATED:
        return partial(launched.multiply_gated, x)
    if kernel == LINEAR:
        return partial(launched.multiply, x)
    residual = x.new_zeros(len(x), len(weight.data))

    def add() -> Tensor:
        left = launched.add_to(residual, x)
        return residual if left is None else left

    return add


def winner(library_s: float, times_s: Mapping[ProductTiling, float]) -> ProductTiling | None:
    """The fastest tiling if it beats the library by more than noise, else None."""
    best = min(times_s, key=lambda tiling: times_s[tiling], default=None)
    return best if best is not None and times_s[best] * LEAST_GAIN < library_s else None


def _kind(tiling: ProductTiling) -> str:
    return "persistent" if isinstance(tiling, PersistentTiling) else "own"


def _named(tiling: ProductTiling) -> dict[str, int]:
    return {f"tile_{name}": value for name, value in asdict(tiling).items()}
