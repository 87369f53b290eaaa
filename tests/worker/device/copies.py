"""Copies between host and device: which of them may be under way, and what must not be touched meanwhile."""

import weakref
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tests.worker.device.faults import EarlyRead, GraphFault, HostSync, UnsafeCopy
from tests.worker.device.memory import Allocation, Allocations
from tests.worker.device.tensor import DeviceTensor
from tests.worker.device.timeline import Clock, Timeline

POISON = 0xA5  # what stands where a result has not arrived

Invent = Callable[[Tensor], None]


@dataclass(frozen=True, slots=True)
class Sent:
    """A copy from the host that may be under way."""

    at: tuple[int, int]  # stream, number
    source: Tensor
    checksum: int


@dataclass(frozen=True, slots=True)
class Pending:
    """A copy to the host that may be under way."""

    at: tuple[int, int]
    target: Tensor


class Copies:
    """All copies of a device."""

    def __init__(
        self, timeline: Timeline, blocks: Allocations, use: Callable[[Allocation], None], invent: Invent
    ) -> None:
        """use: told of a block that the current stream reads or writes
        invent: fills a tensor of the host with what could have come from the device"""
        self.launching = False  # while the host puts a step on the queue, no copy may block
        self._timeline, self._blocks, self._use, self._invent = timeline, blocks, use, invent
        self._pinned: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # by address
        self._sent: list[Sent] = []
        self._pending: dict[int, Pending] = {}  # by address

    def pin(self, tensor: Tensor) -> None:
        """The host got pinned memory."""
        storage = tensor.untyped_storage()
        at = storage.data_ptr()
        self._pinned[at] = weakref.ref(storage, lambda _: self._pinned.pop(at, None))

    def check_read(self, tensor: Tensor) -> None:
        """The host looks at a tensor of its own."""
        if self._pending and not isinstance(tensor, DeviceTensor):
            pending = self._pending.get(_address(tensor))
            if pending is not None:
                raise EarlyRead(f"{tuple(pending.target.shape)} {pending.target.dtype} has not arrived")

    def copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        """target.copy_(source), one of them on the host; → target"""
        to_device = isinstance(target, DeviceTensor)
        what = f"{tuple(source.shape)} {source.dtype} {'from' if to_device else 'to'} the host"
        if self._timeline.capturing:
            raise GraphFault(f"a copy of {what} inside a capture")
        if to_device:
            self._send(source, target, non_blocking, what)
        else:
            self._receive(source, target, non_blocking, what)
        return target

    def waited(self) -> None:
        """The host knows more to be done: copies up to there are checked, and results are there."""
        host = self._timeline.host
        for sent in self._sent:
            if _done(host, sent.at) and zlib.crc32(_bytes(sent.source).data) != sent.checksum:
                raise UnsafeCopy("pinned memory was written to while it was being copied to the device")
        self._sent = [sent for sent in self._sent if not _done(host, sent.at)]
        for address, pending in list(self._pending.items()):
            if _done(host, pending.at):
                del self._pending[address]
                with _disable_current_modes():
                    self._invent(pending.target)

    def _send(self, source: Tensor, target: Tensor, non_blocking: bool, what: str) -> None:
        if self.launching:
            if not non_blocking or _address(source) not in self._pinned:
                reason = "its memory is not pinned" if non_blocking else "non_blocking is not set"
                raise UnsafeCopy(f"a copy of {what} that blocks: {reason}")
            _check_alike(source, target, what)
        at = self._timeline.tick()
        self._use(self._blocks.of(target))
        data = _bytes(source)
        if source.dtype == target.dtype:
            self._blocks.learn(target, data)
        if non_blocking:
            self._sent.append(Sent(at, source, zlib.crc32(data.data)))

    def _receive(self, source: Tensor, target: Tensor, non_blocking: bool, what: str) -> None:
        if not non_blocking:
            raise HostSync(f"a copy of {what} that blocks")
        if _address(target) not in self._pinned:
            raise UnsafeCopy(f"a copy of {what} into memory that is not pinned")
        if self._timeline.current is self._timeline.main:
            raise UnsafeCopy(f"a copy of {what} on the stream that computes")
        _check_alike(source, target, what)
        at = self._timeline.tick()
        self._use(self._blocks.of(source))
        if target.numel():
            target.view(torch.uint8).fill_(POISON)
            self._pending[_address(target)] = Pending(at, target)


def _check_alike(source: Tensor, target: Tensor, what: str) -> None:
    """A copy is one transfer only where nothing is converted."""
    contiguous = source.is_contiguous() and target.is_contiguous()
    if not contiguous or source.dtype != target.dtype or source.shape != target.shape:
        raise UnsafeCopy(f"a copy of {what} that is converted on the way")


def _address(tensor: Tensor) -> Any:
    return tensor.untyped_storage().data_ptr()


def _bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """Of a tensor of the host."""
    with _disable_current_modes():
        return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()


def _done(host: Clock, at: tuple[int, int]) -> bool:
    stream, number = at
    return host.get(stream, 0) >= number
