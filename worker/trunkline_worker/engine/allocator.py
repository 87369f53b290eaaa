"""How the engine process allocates memory on the host, with glibc. Other C libraries are left as they are, and so are
processes that the engine starts."""

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # of mallopt(3)
MOST_TRIM_THRESHOLD = (1 << 31) - 1
MOST_MMAP_THRESHOLD = 32 << 20


def use_one_arena() -> None:
    """Makes all threads allocate from one heap. Call it before there are threads: an arena of their own has heaps of at
    most 64 MiB, which are unmapped as soon as they are empty."""
    _set(M_ARENA_MAX, 1)


def keep_freed_memory() -> None:
    """Makes the process keep memory that a step frees for the next one, except allocations of 32 MiB and more. Where
    steps are computed on a CPU, page faults take up to a tenth of a step of long prompts otherwise. Call it once the
    model is loaded and the KV pool is sized, which takes the memory that is free."""
    _set(M_MMAP_THRESHOLD, MOST_MMAP_THRESHOLD)
    _set(M_TRIM_THRESHOLD, MOST_TRIM_THRESHOLD)


def _set(parameter: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(parameter, value)  # if it is refused, steps are slower, which is no reason not to serve
