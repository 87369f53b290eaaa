"""What would make the other stages useless, found in the first minute."""

import torch

from trunkline_bench.gpu import attention, ceilings, equality, token_wise
from trunkline_bench.gpu.ceilings import Rows
from trunkline_bench.gpu.shapes import Shapes
from trunkline_kernels.gpu.rms_norm import rms_norm
from trunkline_kernels.gpu.silu_and_mul import silu_and_mul

CONTEXTS = (1, 17, 257)


def check(shapes: Shapes) -> Rows:
    """The device's own speed, each kernel once against its twin, a captured graph, and four requests through the
    engine; raises AssertionError at the first that is wrong."""
    yield from ceilings.measure(shapes)
    yield _graph(shapes)
    yield from attention.smoke(shapes, CONTEXTS)
    yield from token_wise.check(shapes)
    yield equality.smoke(shapes)


def _graph(shapes: Shapes) -> dict[str, object]:
    """Kernels in a captured graph, replayed with other inputs than it was captured with."""
    if shapes.device.type != "cuda":
        return {"what": "captured graph", "replayed": False}
    x = torch.randn(8, 4096, device=shapes.device).to(shapes.dtype)
    weight = torch.randn(4096, device=shapes.device).to(shapes.dtype)

    def compute() -> torch.Tensor:
        return silu_and_mul(rms_norm(x, weight, 1e-6))

    compute()  # compiled before it is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = compute()
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert torch.equal(found, compute()), "a replayed graph computes something else than its kernels"
    return {"what": "captured graph", "replayed": True}
