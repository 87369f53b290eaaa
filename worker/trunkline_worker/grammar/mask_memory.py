"""The memory that an engine shares with its matching processes: the masks, and what each process is working on.

The engine reads the latter after a process has died, or when it takes too long: messages would never be sent.
"""

import ctypes
import mmap
import struct
from typing import BinaryIO, NamedTuple

from trunkline_worker.link.channel import shared_file

WORK = struct.Struct("<Qd")  # slot + 1, or 0; since when, on CLOCK_MONOTONIC
HEADER_BYTES = mmap.PAGESIZE
MOST_PROCESSES = HEADER_BYTES // WORK.size


class Work(NamedTuple):
    """A process is working on a sequence."""

    slot: int
    since_s: float


class MaskMemory:
    """One mask for each slot: bit t % 32 of word t // 32 says whether token t may follow."""

    def __init__(self, descriptor: int, vocab_size: int, num_slots: int) -> None:
        self.mask_bytes = _mask_bytes(vocab_size)
        self._map = mmap.mmap(descriptor, HEADER_BYTES + num_slots * self.mask_bytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    @classmethod
    def create(cls, vocab_size: int, num_slots: int) -> tuple["MaskMemory", BinaryIO]:
        """New memory, and its file, which other processes open. Pages are allocated as they are used."""
        file = shared_file("masks", HEADER_BYTES + num_slots * _mask_bytes(vocab_size))
        return cls(file.fileno(), vocab_size, num_slots), file

    @property
    def masks(self) -> memoryview:
        """A view of all masks.  # [num_slots * num_words], int32"""
        return memoryview(self._map)[HEADER_BYTES:].cast("i")

    def address(self, slot: int) -> int:
        """Where a mask lies in this process."""
        return self._address + HEADER_BYTES + slot * self.mask_bytes

    def begin_work(self, process: int, slot: int, now_s: float) -> None:
        WORK.pack_into(self._map, process * WORK.size, slot + 1, now_s)

    def end_work(self, process: int) -> None:
        WORK.pack_into(self._map, process * WORK.size, 0, 0.0)

    def work(self, process: int) -> Work | None:
        """What a process is working on, or was when it died."""
        slot, since_s = WORK.unpack_from(self._map, process * WORK.size)
        return Work(slot - 1, since_s) if slot and since_s else None  # while it is written, it has no time


def _mask_bytes(vocab_size: int) -> int:
    return 4 * ((vocab_size + 31) // 32)
