"""Launches of Triton kernels, looked at instead of carried out."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.worker.device.faults import LaunchFault, MixedDevices
from tests.worker.device.tensor import DeviceTensor

MOST_BLOCKS = (2**31 - 1, 65535, 65535)  # of a grid: CUDA's limits
WARPS = (1, 2, 4, 8, 16, 32)
ALIGNMENT = 16  # bytes: a pointer that has less of it is another kernel to Triton, compiled when it is first seen
FLAGS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion", "launch_pdl")

# Types of tensors.
INT32, INT64, FLOAT32 = (torch.int32,), (torch.int64,), (torch.float32,)
WIDE = (torch.float32, torch.bfloat16, torch.float16)
POOL = (*WIDE, torch.float8_e4m3fn)
MOST_BOX = 256  # elements in a dimension that the copy engine fetches at a time (CUDA driver API, tensor maps)
MOST_ELEMENTS = 1 << 20  # of one tensor in a kernel: Triton's limit

Contents = Callable[[Tensor], Any]


@dataclass(frozen=True, slots=True)
class Signature:
    """A kernel's parameters."""

    names: tuple[str, ...]
    constants: frozenset[str]
    unspecialised: frozenset[str]


@cache
def signature_of(kernel: Any) -> Signature:
    """Of a JITFunction, or of what stands for it where kernels are interpreted."""
    parameters = inspect.signature(kernel.fn).parameters
    options = getattr(kernel, "kwargs", None) or {"do_not_specialize": kernel.do_not_specialize}
    return Signature(
        tuple(parameters),
        frozenset(name for name, found in parameters.items() if found.annotation is tl.constexpr),
        frozenset(options.get("do_not_specialize") or ()),
    )


class Launch:
    """One kernel with its grid and arguments; checks for contracts."""

    def __init__(
        self, kernel: Any, grid: Sequence[Any], args: Sequence[Any], kwargs: dict[str, Any], contents: Contents
    ) -> None:
        self.name: str = kernel.fn.__name__
        self.signature = signature_of(kernel)
        self.options = {name: value for name, value in kwargs.items() if name not in self.signature.names}
        self.arguments: dict[str, Any] = dict(zip(self.signature.names, args, strict=False))
        self.arguments |= {name: value for name, value in kwargs.items() if name in self.signature.names}
        self.grid = tuple(grid)
        self._contents = contents
        self._check()

    def fault(self, what: str) -> LaunchFault:
        return LaunchFault(f"{self.name}{list(self.grid)}: {what}")

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def number(self, name: str) -> int:
        value: int = self.arguments[name]
        return value

    def tensors(self) -> dict[str, Tensor]:
        """Those that descriptors describe, too."""
        found = {
            name: value.base if isinstance(value, TensorDescriptor) else value for name, value in self.arguments.items()
        }
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}

    def contents(self, name: str) -> Any:
        """An array, where the host has sent what this tensor holds; else None."""
        return self._contents(self.arguments[name])

    def require(self, holds: bool, what: str) -> None:
        if not holds:
            raise self.fault(what)

    def holds(self, name: str, kinds: Sequence[Any], count: int) -> None:
        """A contiguous tensor of one of these types, with at least so many elements."""
        tensor: Tensor = self.arguments[name]
        self.require(tensor.dtype in kinds, f"{name} is {tensor.dtype}, not one of {list(kinds)}")
        self.require(tensor.is_contiguous(), f"{name} is not contiguous: {tuple(tensor.shape)}, {tensor.stride()}")
        self.require(tensor.numel() >= count, f"{name} has {tensor.numel()} elements, and {count} are read or written")

    def describes(self, name: str, kinds: Sequence[Any], shape: Sequence[int], block: Sequence[int]) -> None:
        """A descriptor of a contiguous tensor of one of these types, which is read in blocks."""
        found: TensorDescriptor = self.arguments[name]
        tensor: Tensor = found.base
        self.require(tensor.dtype in kinds, f"{name} is {tensor.dtype}, not one of {list(kinds)}")
        self.require(tensor.is_contiguous(), f"{name} is not contiguous: {tuple(tensor.shape)}, {tensor.stride()}")
        self.require(tuple(found.shape) == tuple(shape), f"{name} describes {tuple(found.shape)}, not {tuple(shape)}")
        self.require(tuple(found.strides) == tensor.stride(), f"{name} has strides {tuple(found.strides)}")
        self.require(tuple(found.block_shape) == tuple(block), f"{name} is read by {found.block_shape}, not {block}")
        self.require(max(found.block_shape) <= MOST_BOX, f"{name} is read by {found.block_shape}")

    def within(self, name: str, low: int, high: int, values: Any) -> None:
        """Known contents of `name` that are indices."""
        found = np.asarray(values)
        if found.size and not (found.min() >= low and found.max() < high):
            raise self.fault(f"{name} holds {found.min()} to {found.max()}, and [{low}, {high}) is what there is")

    def powers_of_two(self, *names: str) -> None:
        for name in names:
            value = self.arguments[name]
            self.require(value > 0 and value & (value - 1) == 0, f"{name}={value} is no power of two")

    def specialisation(self) -> tuple[Any, ...]:
        """What Triton compiles a kernel of its own for."""
        return (self.name, tuple(sorted(self.options.items())), *(self._kind(name) for name in self.signature.names))

    def _kind(self, name: str) -> Any:
        value = self.arguments[name]
        if name in self.signature.constants:
            return value
        if isinstance(value, Tensor):
            return value.dtype
        if isinstance(value, TensorDescriptor):
            return value.base.dtype, tuple(value.block_shape)
        if isinstance(value, float) or name in self.signature.unspecialised:
            return type(value).__name__
        return 1 if value == 1 else value % 16 == 0

    def _check(self) -> None:
        self.require(1 <= len(self.grid) <= 3, "a grid has one to three dimensions")
        for blocks, most in zip(self.grid, MOST_BLOCKS, strict=False):
            self.require(type(blocks) is int and 0 < blocks <= most, f"{blocks!r} is no number of blocks")
        missing = [name for name in self.signature.names if name not in self.arguments]
        self.require(not missing, f"no {', '.join(missing)}")
        for name, value in self.arguments.items():
            if isinstance(value, TensorDescriptor):
                self._check_tensor(name, value.base)
            elif isinstance(value, Tensor):
                self._check_tensor(name, value)
            elif name in self.signature.constants:
                self.require(type(value) in (int, bool), f"{name}={value!r} is no constant")
            else:
                self.require(type(value) in (int, float), f"{name}={value!r} is not a plain number")
                if type(value) is int:
                    self.require(-(2**31) <= value < 2**31, f"{name}={value} does not fit 32 bits")
        unknown = self.options.keys() - set(FLAGS)
        self.require(not unknown, f"options {unknown}")
        self.require(self.options.get("num_warps", 4) in WARPS, f"num_warps={self.options.get('num_warps')}")
        early, waits = self.options.get("launch_pdl", False), self.arguments.get("DEPENDENT", False)
        self.require(early == waits, f"launched with launch_pdl={early} and DEPENDENT={waits}")

    def _check_tensor(self, name: str, tensor: Tensor) -> None:
        if not isinstance(tensor, DeviceTensor):
            raise MixedDevices(f"{self.name}: {name} is on the host")
        self.require(name not in self.signature.constants, f"{name} is a constant, and a tensor was given")
        offset = tensor.storage_offset() * tensor.itemsize
        self.require(
            offset % ALIGNMENT == 0, f"{name} begins {offset % ALIGNMENT} bytes past a multiple of {ALIGNMENT}"
        )


def check_pool(at: Launch, *, kv_heads: int) -> None:
    """Keys and values are one layer's views of a pool: each block is contiguous, and aligned for vectorised loads."""
    size, dim = at.number("BLOCK_SIZE"), at.number("HEAD_DIM")
    for name in ("keys", "values"):
        pool, stride = at[name], at.number("block_stride")
        at.require(pool.dtype in POOL and pool.dtype == at["keys"].dtype, f"{name} is {pool.dtype}")
        at.require(tuple(pool.shape[1:]) == (size, kv_heads, dim), f"{name} is {tuple(pool.shape)}")
        at.require(pool.stride() == (stride, kv_heads * dim, dim, 1), f"{name} has strides {pool.stride()}")
        at.require(stride * pool.itemsize % ALIGNMENT == 0, f"{name}: blocks are {stride} elements apart")


def check_scales(at: Launch, *names: str) -> None:
    """The pool holds 8-bit numbers exactly where there are scales."""
    keys = at.arguments.get("keys")
    if keys is not None:
        at.require(bool(at["SCALED"]) == (keys.dtype == torch.float8_e4m3fn), f"SCALED with keys of {keys.dtype}")
    if at["SCALED"]:
        for name in names:
            at.holds(name, FLOAT32, 1)
