"""Records launches of Triton kernels instead of running them, and compiles the kernels without a GPU.

Launchers run on tensors without memory (device "meta").
"""

import math
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)  # before any kernel is defined

import torch
import triton
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from trunkline_kernels.gpu.dependent_launch import is_offered

META = torch.device("meta")
TYPES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8e4nv",
    torch.int8: "i8", torch.uint8: "u8", torch.int32: "i32", torch.int64: "i64", torch.bool: "i1",
}  # fmt: skip

# Instructions for matrix products on tensor cores, by backend.
TENSOR_CORE = {"cuda": re.compile(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b"), "hip": re.compile(r"\bv_mfma_")}


@dataclass(frozen=True, slots=True)
class Chip:
    """A compilation target and its properties."""

    name: str
    target: GPUTarget
    capability: tuple[int, int]
    shared_memory: int  # largest number of bytes of a program
    fp8: bool  # supports float8_e4m3fn, as the KV pool uses it

    @property
    def dependent(self) -> bool:
        """Whether kernels are launched before the kernels ahead of them have ended."""
        return is_offered(self.capability, is_nvidia=self.target.backend == "cuda")


CHIPS = {
    "sm_80": Chip("sm_80", GPUTarget("cuda", 80, 32), (8, 0), 163 << 10, False),
    "sm_90": Chip("sm_90", GPUTarget("cuda", 90, 32), (9, 0), 227 << 10, True),
    "sm_100": Chip("sm_100", GPUTarget("cuda", 100, 32), (10, 0), 227 << 10, True),
    "gfx942": Chip("gfx942", GPUTarget("hip", "gfx942", 64), (9, 4), 64 << 10, False),
}


@dataclass(frozen=True, slots=True)
class Launch:
    """One recorded launch of a kernel."""

    kernel: JITFunction[Any]
    arguments: dict[str, Any]
    options: dict[str, Any]
    programs: int  # in the grid


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources of one compiled kernel. `shared`: bytes per program; `spills`: bytes per thread."""

    kernel: str
    registers: int
    spills: int
    shared: int
    tensor_cores: bool
    waits_late: bool  # the kernel may start before its inputs are ready, and accesses memory before it waits for them


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Launches inside the context are appended to the list instead of running."""
    launches: list[Launch] = []

    def record(kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        names = kernel.arg_names
        arguments = dict(zip(names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in names}
        options = {k: v for k, v in kwargs.items() if k not in names}
        launches.append(Launch(kernel, arguments, options, math.prod(grid)))

    original = JITFunction.run
    JITFunction.run = record
    try:
        yield launches
    finally:
        JITFunction.run = original


def compiled(launch: Launch, chip: Chip) -> Any:
    """The compiled kernel, specialised as Triton does at the launch: for ones and for multiples of 16."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr or (isinstance(value, int) and value == 1):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, TensorDescriptor):
            signature[parameter.name] = f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)}>"
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32"
            if value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, constants, attributes)
    return triton.compile(source, target=chip.target, options=launch.options)


def resources(launch: Launch, chip: Chip) -> Resources:
    """Compiles the kernel and reads its resources from the assembly or with the vendor's tools."""
    built = compiled(launch, chip)
    name = launch.kernel.__name__
    if chip.target.backend == "hip":
        text = built.asm["amdgcn"]
        registers = int(re.search(r"\.vgpr_count:\s+(\d+)", text)[1])  # type: ignore[index]
        spills = int(re.search(r"\.vgpr_spill_count:\s+(\d+)", text)[1])  # type: ignore[index]
    else:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(built.asm["cubin"])
            file.flush()
            usage = _cuobjdump("-res-usage", file.name)
            registers, stack = (int(re.search(rf"{word}:(\d+)", usage)[1]) for word in ("REG", "STACK"))  # type: ignore[index]
            # Disassembling takes as long as compiling.
            spills = stack if stack and re.search(r"\b(STL|LDL)\b", _cuobjdump("-sass", file.name)) else 0
        text = built.asm["ptx"]
    found = bool(TENSOR_CORE[chip.target.backend].search(text))
    late = bool(launch.options.get("launch_pdl")) and _waits_late(built.asm["ptx"])
    return Resources(name, registers, spills, built.metadata.shared, found, late)


def _waits_late(ptx: str) -> bool:
    """Whether the kernel accesses memory or branches before the wait."""
    wait = ptx.find("griddepcontrol.wait")
    return wait < 0 or bool(re.search(r"\b(ld|st|atom|red|cp)\.[\w.:]*(global|async)|\b(bra|ret)\b", ptx[:wait]))


def _cuobjdump(*arguments: str) -> str:
    command = [str(Path(nvidia.__file__).parent / "bin" / "cuobjdump"), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
