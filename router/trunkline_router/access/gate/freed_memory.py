"""When the C library returns freed memory to the system.

Fresh memory costs a page fault for every 4 KiB. If each large block came from the system and went straight back, these
faults would be three quarters of the time that the event loop spends on a large request. So the process keeps freed
memory while large requests arrive, and returns it once they stop or once it has kept too much. To return memory, the
C library walks its heap, and no other thread can allocate meanwhile: up to 0.2 s if many small objects fill the heap.
So the router asks for it only after large requests.
"""

import asyncio
import contextlib
import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from resource import getpagesize

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # mallopt(3)
LARGEST_KEPT_BYTES = 16 << 20  # largest block that is kept: twice the largest request
TOP_BYTES = 32 << 20  # free bytes at the end of the heap beyond which the C library returns memory at once

CHECK_INTERVAL_S = 0.5
MAX_GROWTH_BYTES = 256 << 20  # beyond the baseline: too much to keep even while large requests arrive
MIN_CHECKS_APART = 4  # between two returns while large requests arrive, which soon need the memory again
MIN_GAIN_BYTES = 16 << 20  # less is not worth a walk through the heap
QUIET_BYTES = 1 << 20  # fewer bytes of large requests in memory mean that none are arriving

STATM = Path("/proc/self/statm")


def keep_freed_memory() -> None:
    """Makes the C library keep freed blocks of up to LARGEST_KEPT_BYTES. Does nothing without glibc."""
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)
        library.mallopt(M_TRIM_THRESHOLD, TOP_BYTES)


class FreedMemory:
    """Decides when to return freed memory. Pure: the caller passes sizes in bytes every CHECK_INTERVAL_S."""

    def __init__(self) -> None:
        self._baseline = 0  # lowest resident memory since the last return without large requests
        self._was_quiet = False
        self._checks = 0  # since the last return
        self._arrived = self._arrived_before = 0  # bytes so far, and at the last return without large requests

    @property
    def is_quiet(self) -> bool:
        """Whether no large requests were arriving at the last check."""
        return self._was_quiet

    def is_due(self, resident: int, in_requests: int, arrived: int) -> bool:
        """Whether to return memory now.

        `resident`: memory of the process; `in_requests`: wire size of the large requests in memory; `arrived`: bytes so
        far of everything that leaves memory worth returning.
        """
        self._arrived = arrived
        was_quiet, self._was_quiet = self._was_quiet, in_requests < QUIET_BYTES
        self._baseline = min(self._baseline or resident, resident)
        self._checks += 1
        growth = resident - self._baseline
        if arrived - self._arrived_before < MIN_GAIN_BYTES:
            return False
        if was_quiet and self._was_quiet:
            return growth > MIN_GAIN_BYTES
        return growth > MAX_GROWTH_BYTES and self._checks >= MIN_CHECKS_APART

    def returned(self, resident: int) -> None:
        """Records that freed memory was returned and that the process now has `resident` bytes."""
        self._checks = 0
        if self._was_quiet:  # otherwise `resident` includes large requests, which are freed in a moment
            self._baseline, self._arrived_before = resident, self._arrived


async def return_freed_memory(large: Callable[[], tuple[int, int]]) -> None:
    """Returns freed memory whenever FreedMemory says so, until cancelled.

    `large` returns two byte counts: large requests in memory, and the total so far of large requests and of output
    dropped for slow clients. Does nothing without glibc or if the system does not report the size of the process.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    memory = FreedMemory()
    while True:
        await asyncio.sleep(CHECK_INTERVAL_S)
        resident = resident_bytes()
        if trim is not None and resident is not None and memory.is_due(resident, *large()):
            if memory.is_quiet:
                gc.collect()  # also frees the reference cycles that requests left behind
            await asyncio.to_thread(trim, 0)  # ctypes releases the GIL during the call
            memory.returned(resident_bytes() or 0)


def resident_bytes() -> int | None:
    """Resident memory of this process, or None if the system does not report it."""
    try:
        return int(STATM.read_text().split()[1]) * getpagesize()
    except OSError:
        return None
