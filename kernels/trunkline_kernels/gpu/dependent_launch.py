"""Programmatic dependent launch: the programs of a kernel start while the previous kernel on the stream ends.

Without it, the device starts a kernel when the previous one has ended and its results are in memory. With it, the
programs have started by then and wait. NVIDIA's devices support this from compute capability 9.0 on, also in captured
graphs. TRUNKLINE_DEPENDENT_LAUNCHES=off turns it off.

Each program of such a kernel waits before it touches memory, even a program without work, because a later kernel relies
on the end of this one to mean that all kernels before it have ended.

Source: CUDA C++ programming guide, "Programmatic Dependent Launch and Synchronization".
"""

import os

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

VARIABLE = "TRUNKLINE_DEPENDENT_LAUNCHES"
OLDEST_CAPABILITY = (9, 0)


@triton.jit
def wait_for_inputs(DEPENDENT: tl.constexpr):
    """Waits until the kernels before this one have ended. The next kernel's programs may start from then on. A kernel
    must call it before it reads or writes memory that other kernels use."""
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def ask_for(place):
    """Prefetches cache lines of memory into the L2 cache, without waiting for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [place.to(tl.int64, bitcast=True)], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


def launch_options(dependent: bool) -> dict[str, bool]:
    """Returns Triton's options for a launch of a kernel with DEPENDENT. Other backends do not know the option, so it is
    absent for plain launches."""
    return {"launch_pdl": True} if dependent else {}


def is_offered(capability: tuple[int, int], *, is_nvidia: bool) -> bool:
    """Whether to use dependent launches on a device. Raises ValueError if the environment variable has an unknown
    value."""
    asked = os.environ.get(VARIABLE, "auto")
    if asked not in ("auto", "off"):
        raise ValueError(f"{VARIABLE} is {asked!r}: it may be auto or off")
    return asked == "auto" and is_nvidia and capability >= OLDEST_CAPABILITY
