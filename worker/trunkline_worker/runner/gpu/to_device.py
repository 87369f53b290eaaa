"""Copies several host arrays to the device in one copy."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

ALIGNMENT = 16  # bytes, the alignment that kernels are specialised for
TYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32, np.dtype(np.float32): torch.float32}


def to_device(arrays: list[NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """Returns the arrays (int64, int32 or float32) on the device, in order, with their shapes. They share a buffer."""
    sizes = [-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]
    # The buffer may be freed before the copy ends: torch's pinned-memory allocator waits for the stream.
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    host = buffer.numpy()
    offset = 0
    for array, size in zip(arrays, sizes, strict=True):
        host[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        offset += size
    parts = torch.split(buffer.to(device, non_blocking=True), sizes)
    return [
        part[: array.nbytes].view(TYPES[array.dtype]).view(array.shape)
        for part, array in zip(parts, arrays, strict=True)
    ]
