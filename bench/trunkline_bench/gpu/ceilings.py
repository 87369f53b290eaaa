"""What the device itself can do: everything else is measured against this."""

import torch

from trunkline_bench.gpu.shapes import Shapes, median_s

Rows = list[dict[str, object]]


def measure(shapes: Shapes) -> Rows:
    """Bytes per second of a copy (read and written), FLOP per second of a matrix product."""
    source = torch.ones(shapes.copy_bytes // 4, dtype=torch.float32, device=shapes.device)
    target = torch.empty_like(source)
    copy_s = median_s(lambda: target.copy_(source), shapes.device)
    size = shapes.matmul
    left = torch.randn(size, size, device=shapes.device, dtype=shapes.dtype)
    right = torch.randn(size, size, device=shapes.device, dtype=shapes.dtype)
    product_s = median_s(lambda: left @ right, shapes.device)
    return [
        {"what": "copy", "gb_per_s": 2 * shapes.copy_bytes / copy_s / 1e9},
        {"what": f"matmul {size}", "tflop_per_s": 2 * size**3 / product_s / 1e12},
    ]
