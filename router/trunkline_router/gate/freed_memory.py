"""Memory that is free again: what the C library keeps of it for the next request, and when the system gets it back.

Fresh memory costs a page fault for every 4 KiB. If each large block comes from the system and goes back at once, these
faults are three quarters of the time that the event loop spends on a large request. So freed memory stays with the
process while large requests come, and goes back once they have stopped, or where it is too much. To give it back, the
C library walks its heap, and no other thread can allocate meanwhile: up to 0.2 s where small things fill the heap. So
it is asked only after large requests.
"""

import asyncio
import contextlib
import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from resource import getpagesize

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # mallopt(3)
LARGEST_KEPT_BYTES = 16 << 20  # of one block: twice the largest request
TOP_BYTES = 32 << 20  # free at the end of the heap: more goes back at once

LOOK_S = 0.5
MOST_BYTES = 256 << 20  # more than before the requests came: too much to keep while they come
LOOKS_APART = 4  # between two returns while large requests come: what goes back is soon needed again
LEAST_BYTES = 16 << 20  # less is not worth a look through the heap
QUIET_BYTES = 1 << 20  # of large requests in memory: no more come

STATM = Path("/proc/self/statm")


def keep_freed_memory() -> None:
    """Has the C library keep freed blocks up to LARGEST_KEPT_BYTES. Does nothing where it is not glibc."""
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_BYTES)
        library.mallopt(M_TRIM_THRESHOLD, TOP_BYTES)


class FreedMemory:
    """Says when freed memory should go back. Pure: it is told the sizes, in bytes, every LOOK_S."""

    def __init__(self) -> None:
        self._settled = 0  # resident memory after the last return while no large requests came, or less
        self._was_quiet = False
        self._looks = 0  # since the last return
        self._come = self._come_before = 0  # so far, and at the last return in quiet

    @property
    def is_quiet(self) -> bool:
        """Whether no large requests came at the last look."""
        return self._was_quiet

    def is_due(self, resident: int, in_requests: int, come: int) -> bool:
        """`resident`: memory of the process; `in_requests`: of it, large requests as they came; `come`: of everything
        so far that leaves much to be returned."""
        self._come = come
        was_quiet, self._was_quiet = self._was_quiet, in_requests < QUIET_BYTES
        self._settled = min(self._settled or resident, resident)
        self._looks += 1
        more = resident - self._settled
        if come - self._come_before < LEAST_BYTES:
            return False
        if was_quiet and self._was_quiet:
            return more > LEAST_BYTES
        return more > MOST_BYTES and self._looks >= LOOKS_APART

    def returned(self, resident: int) -> None:
        """Freed memory has gone back, and the process now has `resident` bytes."""
        self._looks = 0
        if self._was_quiet:  # else large requests are part of it, and their memory is free in a moment
            self._settled, self._come_before = resident, self._come


async def return_freed_memory(large: Callable[[], tuple[int, int]]) -> None:
    """Looks for ever. `large` tells how many bytes of large requests are in memory, and how many of these and of what
    slow clients left have come so far. Does nothing where the C library is not glibc, or the system does not tell the
    size of the process."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    memory = FreedMemory()
    while True:
        await asyncio.sleep(LOOK_S)
        resident = resident_bytes()
        if trim is not None and resident is not None and memory.is_due(resident, *large()):
            if memory.is_quiet:
                gc.collect()  # cycles that requests have left are memory too
            await asyncio.to_thread(trim, 0)  # a call through ctypes lets go of the GIL
            memory.returned(resident_bytes() or 0)


def resident_bytes() -> int | None:
    """Memory of this process; None where the system does not tell it."""
    try:
        return int(STATM.read_text().split()[1]) * getpagesize()
    except OSError:
        return None
