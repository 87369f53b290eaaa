"""Programmatic dependent launch: the programs of a kernel start while the kernel before it on the stream ends.

Without it, the device starts a kernel once the one before has ended and its results are in memory. With it, the
programs are there by then and wait. NVIDIA's devices can do this from compute capability 9.0 on, also in captured
graphs. TRUNKLINE_DEPENDENT_LAUNCHES=off turns it off.

A kernel that is launched so waits in each of its programs before it touches memory, programs without work included: a
later kernel takes the end of this one for the end of all before it.

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
    """The first thing that a kernel does: returns when the kernels before it have ended. The next kernel's programs may
    start from then on."""
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def ask_for(place):
    """Has lines of memory brought into the device's cache, and waits for none."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [place.to(tl.int64, bitcast=True)], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


def launch_options(dependent: bool) -> dict[str, bool]:
    """What a launch of a kernel with DEPENDENT says to Triton: other backends do not know the option."""
    return {"launch_pdl": True} if dependent else {}


def is_offered(capability: tuple[int, int], *, is_nvidia: bool) -> bool:
    """Whether kernels are launched so on a device. Raises ValueError where the environment says something unknown."""
    asked = os.environ.get(VARIABLE, "auto")
    if asked not in ("auto", "off"):
        raise ValueError(f"{VARIABLE} is {asked!r}: it may be auto or off")
    return asked == "auto" and is_nvidia and capability >= OLDEST_CAPABILITY
