"""The device's own ceilings, which other rates are compared with."""

import functools
from collections.abc import Iterator
from dataclasses import replace

import torch

from trunkline_bench.gpu.shapes import Shapes, median_s

Rows = Iterator[dict[str, object]]  # each row is written to the results at once


def measure(shapes: Shapes) -> Rows:
    """Rows with the bytes per second of copies (read and written), a long one and some that move as many bytes as a
    layer's weights have, and one with the FLOP per second of a product."""
    for copied in (shapes.copy_bytes, *shapes.short_copies):
        rate = bandwidth(replace(shapes, copy_bytes=copied))
        yield {"what": "copy", "mb": 2 * copied / 1e6, "gb_per_s": rate / 1e9}
    yield {"what": f"matmul {shapes.matmul}", "tflop_per_s": flops(shapes) / 1e12}


@functools.cache
def bandwidth(shapes: Shapes) -> float:
    """Bytes per second of a copy, read and written."""
    source = torch.ones(shapes.copy_bytes // 4, dtype=torch.float32, device=shapes.device)
    target = torch.empty_like(source)
    return 2 * shapes.copy_bytes / median_s(lambda: target.copy_(source), shapes.device)


@functools.cache
def flops(shapes: Shapes) -> float:
    """FLOP per second of a product of square matrices."""
    size = shapes.matmul
    left = torch.randn(size, size, device=shapes.device, dtype=shapes.dtype)
    right = torch.randn(size, size, device=shapes.device, dtype=shapes.dtype)
    return float(2 * size**3 / median_s(lambda: left @ right, shapes.device))
