"""How the engine process allocates memory on the host."""

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # of mallopt(3)
MOST_TRIM_THRESHOLD = (1 << 31) - 1
MOST_MMAP_THRESHOLD = 32 << 20


def keep_freed_memory() -> None:
    """Makes glibc keep the memory that a step frees for the next one, in one arena: others hold at most 64 MiB. Where
    steps are computed on a CPU, page faults take up to a tenth of a step of long prompts otherwise. Does nothing with
    another C library. Processes that this one starts are not affected."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_ARENA_MAX, 1)
        mallopt(M_MMAP_THRESHOLD, MOST_MMAP_THRESHOLD)
        mallopt(M_TRIM_THRESHOLD, MOST_TRIM_THRESHOLD)
