"""Device memory without a device: what is allocated, for whom, and what of its contents is known."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.worker.device.faults import OutOfDeviceMemory
from tests.worker.device.tensor import storage_of

SMALL = 512  # bytes: torch's allocator rounds up to this
LARGE = 2 << 20  # bytes: and takes larger pieces from the driver in multiples of this


@dataclass(slots=True, eq=False)
class Allocation:
    """One block of device memory."""

    number: int
    num_bytes: int
    pool: int | None  # of the captured graph that it was made in
    stream: int  # it was made for
    uses: dict[int, int] = field(default_factory=dict)  # by stream: the last one
    recorded: set[int] = field(default_factory=set)  # streams that record_stream() was told of
    alive: bool = True
    known: NDArray[np.uint8] | None = None  # what the host has sent there
    known_until: int = 0  # bytes from the beginning


@dataclass(slots=True)
class Ledger:
    """Bytes as torch.cuda counts them (`allocated`), and as the driver does (`reserved`)."""

    total: int
    taken_by_others: int  # contexts, code, other processes
    allocated: int = 0
    peak: int = 0
    reserved: int = 0
    peak_reserved: int = 0
    pools: dict[int, tuple[int, int]] = field(default_factory=dict)  # (now, most): pools keep what they once had

    @property
    def free(self) -> int:
        return self.total - self.taken_by_others - self.reserved

    def change(self, num_bytes: int, sign: int, pool: int | None) -> None:
        small, large = rounded(num_bytes, SMALL), rounded(num_bytes, SMALL if num_bytes < LARGE // 2 else LARGE)
        self.allocated += sign * small
        self.peak = max(self.peak, self.allocated)
        if pool is None:
            self.reserved += sign * large
        else:
            now, most = self.pools.get(pool, (0, 0))
            now += sign * large
            self.reserved += max(0, now - most)
            self.pools[pool] = now, max(most, now)
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        if self.free < 0:
            raise OutOfDeviceMemory(f"{-self.free:,} bytes more than the card's {self.total:,}")


class Allocations:
    """Every block there is, by the storage of its tensors."""

    def __init__(self, ledger: Ledger, freed: Callable[[Allocation], None]) -> None:
        self.ledger = ledger
        self._freed = freed
        self._count = 0
        self._of: dict[int, tuple[Allocation, weakref.ref[torch.UntypedStorage]]] = {}

    def of(self, tensor: Tensor) -> Allocation:
        """The block that a tensor lies in."""
        return self._of[storage_of(tensor)._cdata][0]

    def is_new(self, tensor: Tensor) -> bool:
        return storage_of(tensor)._cdata not in self._of

    def add(self, tensor: Tensor, *, pool: int | None, stream: int) -> Allocation:
        storage = storage_of(tensor)
        self._count += 1
        made = Allocation(self._count, storage.nbytes(), pool, stream)
        key = storage._cdata

        def forget(_: object) -> None:
            del self._of[key]
            made.alive = False
            self.ledger.change(made.num_bytes, -1, made.pool)
            self._freed(made)

        self._of[key] = made, weakref.ref(storage, forget)
        self.ledger.change(made.num_bytes, 1, pool)
        return made

    def learn(self, tensor: Tensor, data: NDArray[np.uint8]) -> None:
        """The host sends these bytes to where a tensor lies."""
        block = self.of(tensor)
        if block.known is None:
            block.known = np.zeros(block.num_bytes, np.uint8)
        start = int(tensor.storage_offset()) * tensor.itemsize
        block.known[start : start + len(data)] = data
        if start <= block.known_until:
            block.known_until = max(block.known_until, start + len(data))

    def contents(self, tensor: Tensor) -> "NDArray[np.int32] | NDArray[np.int64] | NDArray[np.float32] | None":
        """What stands in a contiguous tensor, where the host has sent it; else None."""
        block = self.of(tensor)
        start = tensor.storage_offset() * tensor.itemsize
        end = start + tensor.numel() * tensor.itemsize
        if block.known is None or end > block.known_until:
            return None
        kind = {torch.int32: np.int32, torch.int64: np.int64, torch.float32: np.float32}[tensor.dtype]
        return block.known[start:end].view(kind).reshape(tuple(tensor.shape))


def rounded(num_bytes: int, to: int) -> int:
    return -(-num_bytes // to) * to
