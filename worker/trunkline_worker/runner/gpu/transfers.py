"""Copies between host and device: several host arrays at once, and results while the next step computes."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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


class FromDevice:
    """Copies tensors to the host, and measures a step's time. One instance serves all steps of a device.

    Copies wait for the work that the current stream had before them, and for no later work.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def event(self) -> "torch.cuda.Event | None":
        """Records an event on the current stream and returns it; None on a CPU."""
        if self._stream is None:
            return None
        # blocking: the waiting thread sleeps, and keeps neither a core nor the interpreter busy.
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def send(self, tensors: list[Tensor]) -> "Arriving":
        """Starts copying the tensors, with the values that they will have at this point of the current stream."""
        computed = self.event()
        if self._stream is None or computed is None:
            return Arriving(tensors, None, None)
        self._stream.wait_event(computed)
        with torch.cuda.stream(self._stream):
            hosts = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
            for host, tensor in zip(hosts, tensors, strict=True):
                host.copy_(tensor, non_blocking=True)
                tensor.record_stream(self._stream)
            arrived = self.event()
        return Arriving(hosts, computed, arrived)


class Arriving:
    """Tensors that are being copied to the host."""

    def __init__(
        self, tensors: list[Tensor], computed: "torch.cuda.Event | None", arrived: "torch.cuda.Event | None"
    ) -> None:
        self._tensors = tensors
        self._computed = computed
        self._arrived = arrived

    def wait(self) -> list[Tensor]:
        """Returns the tensors on the host, once they have arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._tensors

    def seconds_since(self, start: "torch.cuda.Event | None") -> float:
        """Returns the seconds from `start` until the tensors were computed; 0 on a CPU. Call it after wait()."""
        return start.elapsed_time(self._computed) / 1e3 if start is not None and self._computed is not None else 0.0
