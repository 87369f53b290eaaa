"""Matrix products with weights that are rearranged once.

In torch's linear(), oneDNN or the BLAS rearranges the weights in every call, and multiplies bfloat16 slowly on a CPU
without instructions for it. Here the weights are rearranged when the model is loaded (linear.c). With hundreds of rows,
oneDNN's kernels for AVX-512 are faster; torch's linear() leaves float32 to MKL, which uses AVX2 on AMD's CPUs.
"""

import ctypes
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from trunkline_kernels.cpu.library import I64, P
from trunkline_kernels.quantized_weight import QuantizedWeight, unpacked_int4

# oneDNN's rearrangement takes a number of rows. 64 was the fastest for every number of rows that was tried.
TYPICAL_ROWS = 64
QUANTIZED_BITS = {"int8": 8, "int4": 4}  # kinds of weights that have kernels, and library()'s argument for them
SHARED = 8  # the kernel's groups of inputs are multiples of it


class LinearArguments(ctypes.Structure):
    """`linear` of linear.h."""

    _fields_ = (
        ("multiply", P),
        ("packed", P),
        ("scales", P),
        ("offsets", P),
        ("bias", P),
        ("inner", I64),
        ("out", I64),
        ("group", I64),
    )


class PackedLinear:
    """Computes x @ weight.T + bias with a rearranged copy of the weight. weight: [out, in]; bias: [out]

    A row's result is the same to the bit whatever the other rows are. Reference: torch.nn.functional.linear.
    """

    __slots__ = (
        "_bias",
        "_dtype",
        "_group",
        "_in",
        "_kernels",
        "_offsets",
        "_out",
        "_packed",
        "_scales",
        "arguments",
        "room",
    )

    def __init__(
        self, kernels: ctypes.CDLL, weight: Tensor | QuantizedWeight, bias: Tensor | None, dtype: torch.dtype
    ) -> None:
        """dtype: of x, and of a weight that is not quantised; kernels: those for the dtype, and for the bits of a
        quantised weight"""
        self._kernels, self._bias = kernels, None if bias is None else bias.contiguous()
        self._scales: Tensor | None = None
        self._offsets: Tensor | None = None
        self._dtype = dtype
        if isinstance(weight, Tensor):
            stored, self._group, num_groups = weight, 0, 0
            self._out, self._in = weight.shape
        else:
            stored, self._in, self._out = _stored(weight), weight.inner, len(weight.data)
            scale = weight.scale.view(self._out, -1)
            num_groups = scale.shape[1]
            self._group = weight.group if num_groups > 1 else _up(self._in, SHARED)
            self._scales = self._in_panels(scale)
            if weight.offset is not None:
                self._offsets = self._in_panels(weight.offset)
            elif weight.zero is not None:
                self._offsets = self._in_panels(-scale * weight.zero.float())
        self.room = _up(self._in, SHARED) + num_groups  # float32 of a row that the kernels rearrange
        num_bytes = kernels.packed_bytes(self._out, self._in)
        self._packed = torch.empty(num_bytes, dtype=torch.uint8)
        stored = stored.contiguous()
        kernels.pack(stored.data_ptr(), self._packed.data_ptr(), self._out, stored.nbytes // max(self._out, 1))
        self.arguments = LinearArguments(
            ctypes.cast(kernels.multiply, P), self._packed.data_ptr(), _pointer(self._scales), _pointer(self._offsets),
            _pointer(self._bias), self._in, self._out, self._group,
        )  # fmt: skip

    def _in_panels(self, of_groups: Tensor) -> Tensor:
        """[out, groups] → [panel, group, output of the panel]"""
        size = self._kernels.panel_outputs()
        padded = of_groups.new_zeros(_up(self._out, size), of_groups.shape[1])
        padded[: self._out] = of_groups
        return padded.view(-1, size, of_groups.shape[1]).transpose(1, 2).contiguous()

    def multiply(self, x: Tensor) -> Tensor:
        """x: [num_rows, in], contiguous → [num_rows, out] in x's dtype"""
        assert x.is_contiguous(), "the kernel reads rows that lie side by side"
        assert (x.dtype, x.shape[1]) == (self._dtype, self._in), "the kernel reads other rows"
        num_rows = len(x)
        result = x.new_empty(num_rows, self._out)
        arranged = torch.empty(num_rows * self.room, dtype=torch.float32)
        self._kernels.multiply(
            ctypes.byref(self.arguments), x.data_ptr(), result.data_ptr(), arranged.data_ptr(), num_rows
        )
        return result


class GroupedArguments(ctypes.Structure):
    """`grouped` of linear.h."""

    _fields_ = (
        *((name, P) for name in ("multiply", "packed", "scales", "offsets")),
        *((name, I64) for name in ("count", "inner", "out", "group")),
    )


class GroupedLinear:
    """Several weights of one size, each for rows of its own, for kernels that multiply by them. The product of a row is
    PackedLinear's to the bit."""

    __slots__ = ("_addresses", "_weights", "arguments", "out", "room")

    def __init__(self, weights: Sequence[PackedLinear]) -> None:
        self._weights, of = weights, weights[0]
        parts = zip(*((each._packed, each._scales, each._offsets) for each in weights), strict=True)
        self._addresses = [None if of_all[0] is None else _addresses(of_all) for of_all in parts]
        self.room, self.out = of.room, of._out
        self.arguments = GroupedArguments(
            ctypes.cast(of._kernels.multiply_grouped, P), *map(_pointer, self._addresses), len(weights), of._in,
            of._out, of._group,
        )  # fmt: skip


def _stored(weight: QuantizedWeight) -> Tensor:
    """The bytes of each output in the order of its inputs, the first of a byte in its low bits."""
    if weight.kind == "int8":
        return weight.data
    values = unpacked_int4(weight)
    return values[:, 0::2] | values[:, 1::2] << 4


def _addresses(tensors: Iterable[Tensor | None]) -> Tensor:
    return torch.tensor([_pointer(each) for each in tensors])


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class OneDnnLinear:
    """The same by oneDNN, through the operators that torch's compiler uses to freeze weights. The bits of a row's
    result depend on the number of rows."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_ROWS)
        self._bias = bias

    def multiply(self, x: Tensor) -> Tensor:
        """x: [num_rows, in] → [num_rows, out] in x's dtype"""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return product


def pack_for_any_rows(kernels: ctypes.CDLL, weight: Tensor, bias: Tensor | None) -> PackedLinear | OneDnnLinear:
    """Returns this CPU's fastest product for a weight [out, in] and a bias [out], if rows are one to thousands."""
    if weight.dtype is torch.bfloat16 and kernels.has_bfloat16_tiles() and _has_onednn(weight.dtype):
        return OneDnnLinear(weight, bias)
    return PackedLinear(kernels, weight, bias, weight.dtype)


def pack_for_many_rows(kernels: ctypes.CDLL, weight: Tensor, bias: Tensor | None) -> PackedLinear | OneDnnLinear | None:
    """Returns this CPU's fastest product for a weight [out, in] and a bias [out], if rows are hundreds; None: torch's
    linear() is."""
    is_wide = kernels.has_wide_vectors() if weight.dtype is torch.float32 else kernels.has_bfloat16_products()
    if is_wide and _has_onednn(weight.dtype):
        return OneDnnLinear(weight, bias)
    return None if weight.dtype is torch.float32 else PackedLinear(kernels, weight, bias, weight.dtype)


def _has_onednn(dtype: torch.dtype) -> bool:
    """Whether this build of torch has oneDNN's products of this dtype."""
    has: bool = (
        torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and (dtype is not torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )
    return has
