"""Copies weights from files to a device in pieces. While one piece is being copied, the next one is read."""

import torch
from torch import Tensor

PIECE_BYTES = 32 << 20
NUM_PIECES = 3  # one being read, one being copied, one in between


class WeightStream:
    """Copies host tensors, possibly of a mapped file, through a few pinned buffers. The host's memory therefore never
    holds the whole model, and reading overlaps with copying.
    """

    def __init__(self, device: torch.device, piece_bytes: int = PIECE_BYTES) -> None:
        on_gpu = device.type == "cuda"
        self._device = device
        self._pieces = [torch.empty(piece_bytes, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(NUM_PIECES)]
        self._copied: list[torch.cuda.Event | None] = [None] * NUM_PIECES
        self._next = 0

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copies a host tensor into one of the same shape on the device, in the target's dtype.

        target: contiguous; later work on its stream sees the copied values
        """
        flat, out = source.reshape(-1), target.view(-1)
        size = len(self._pieces[0]) // source.element_size()
        for start in range(0, len(flat), size):
            part = flat[start : start + size]
            self._send(part, out[start : start + len(part)])

    def _send(self, part: Tensor, out: Tensor) -> None:
        at = self._next
        self._next = (at + 1) % len(self._pieces)
        copied = self._copied[at]
        if copied is not None:
            copied.synchronize()
        staged = self._pieces[at][: part.numel() * part.element_size()].view(part.dtype)
        staged.copy_(part)
        # The device converts the dtype, where the cost is negligible.
        out.copy_(staged.to(self._device, non_blocking=True))
        if self._device.type == "cuda":
            self._copied[at] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied[at].record()  # type: ignore[union-attr]
