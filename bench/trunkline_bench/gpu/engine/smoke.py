"""Finds in the first minute what would make the other stages useless."""

import torch

from trunkline_bench.gpu import ceilings
from trunkline_bench.gpu.ceilings import Rows
from trunkline_bench.gpu.engine import equality
from trunkline_bench.gpu.kernels import attention, token_wise
from trunkline_bench.gpu.shapes import Shapes
from trunkline_kernels.gpu.persistent_linear import PersistentTiling, ProductRoom, is_offered, persistent_linear
from trunkline_kernels.gpu.rms_norm import rms_norm
from trunkline_kernels.gpu.silu_and_mul import silu_and_mul
from trunkline_kernels.quantized_weight import quantize
from trunkline_worker.model.gpu_decoder import Chip

CONTEXTS = (1, 17, 257)
CHAIN, REPLAYS = 20, 10  # kernels in the captured graph, and number of replays


def check(shapes: Shapes) -> Rows:
    """The device's ceilings, each kernel against its reference, a captured graph, and four requests through the engine.

    Raises AssertionError at the first failure."""
    yield from ceilings.measure(shapes)
    yield _graph(shapes)
    yield from attention.smoke(shapes, CONTEXTS)
    yield from token_wise.check(shapes)
    yield equality.smoke(shapes)


def _graph(shapes: Shapes) -> dict[str, object]:
    """Replays a captured graph with other inputs than it was captured with. Raises AssertionError."""
    if shapes.device.type != "cuda":
        return {"what": "captured graph", "replayed": False}
    x = torch.randn(8, 4096, device=shapes.device).to(shapes.dtype)
    weight = torch.randn(4096, device=shapes.device).to(shapes.dtype)
    square = quantize(torch.randn(4096, 4096, device=shapes.device) / 64, "fp8")
    chip, tiling = Chip.of(shapes.device), PersistentTiling(64, 64, 128, 4, 3, 2)
    room = ProductRoom.allocate([tiling], multiprocessors=chip.num_multiprocessors, device=shapes.device)
    fetches = is_offered(chip.capability, is_nvidia=torch.version.hip is None)

    def compute(dependent: bool) -> torch.Tensor:
        y = x
        for _ in range(CHAIN):  # each kernel reads the output of the one before
            y = rms_norm(y, weight, 1e-6, dependent=dependent)
        if fetches:  # a captured launch keeps its descriptors; programs that share a tile synchronise in each replay
            y = persistent_linear(y, square, tiling, room, dependent=dependent)
        return silu_and_mul(y, dependent=dependent)

    dependent = chip.dependent_launches
    compute(dependent)  # compile before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = compute(dependent)
    for _ in range(REPLAYS):
        x.copy_(torch.randn_like(x))
        graph.replay()
        wrong = f"a replayed graph differs from its kernels (dependent launches: {dependent})"
        assert torch.equal(found, compute(False)), wrong
    return {"what": "captured graph", "replayed": True, "dependent_launches": dependent, "fetches_tiles": fetches}
