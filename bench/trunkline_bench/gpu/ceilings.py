"""What the device itself can do: everything else is measured against this."""

import functools
from collections.abc import Iterator

import torch

from trunkline_bench.gpu.shapes import Shapes, median_s

Rows = Iterator[dict[str, object]]  # each is written to the results as soon as it is there


def measure(shapes: Shapes) -> Rows:
    """Bytes per second of a copy (read and written), FLOP per second of a matrix product."""
    yield {"what": "copy", "gb_per_s": bandwidth(shapes) / 1e9}
    yield {"what": f"matmul {shapes.matmul}", "tflop_per_s": flops(shapes) / 1e12}


@functools.cache
def bandwidth(shapes: Shapes) -> float:
    """Bytes per second, read and written."""
    source = torch.ones(shapes.copy_bytes // 4, dtype=torch.float32, device=shapes.device)
    target = torch.empty_like(source)
    return 2 * shapes.copy_bytes / median_s(lambda: target.copy_(source), shapes.device)


@functools.cache
def flops(shapes: Shapes) -> float:
    """FLOP per second of a square product."""
    size = shapes.matmul
    left = torch.randn(size, size, device=shapes.device, dtype=shapes.dtype)
    right = torch.randn(size, size, device=shapes.device, dtype=shapes.dtype)
    return float(2 * size**3 / median_s(lambda: left @ right, shapes.device))
