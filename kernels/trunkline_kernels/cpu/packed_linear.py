"""Matrix products with weights that are rearranged once.

In torch's linear(), oneDNN or the BLAS rearranges the weights in every call, and multiplies bfloat16 slowly on a CPU
without instructions for it. Here the weights are rearranged when the model is loaded (linear.c). On a CPU that has such
instructions, products of bfloat16 go to oneDNN, whose kernels use them.
"""

import ctypes

import torch
from torch import Tensor

# oneDNN's rearrangement takes a number of rows. 64 was the fastest for products of every number of rows that was tried.
TYPICAL_ROWS = 64


class PackedLinear:
    """Computes x @ weight.T + bias with a rearranged copy of the weight. weight: [out, in]; bias: [out]

    A row's result is the same to the bit whatever the other rows are. Reference: torch.nn.functional.linear.
    """

    __slots__ = ("_bias", "_dtype", "_in", "_kernels", "_out", "_packed")

    def __init__(self, kernels: ctypes.CDLL, weight: Tensor, bias: Tensor | None) -> None:
        self._kernels, self._bias = kernels, None if bias is None else bias.contiguous()
        self._dtype = weight.dtype
        self._out, self._in = weight.shape
        self._packed = torch.empty(kernels.packed_bytes(self._out, self._in), dtype=torch.uint8)
        kernels.pack(weight.contiguous().data_ptr(), self._packed.data_ptr(), self._out, self._in)

    def multiply(self, x: Tensor) -> Tensor:
        """x: [num_rows, in], contiguous → [num_rows, out] in x's dtype"""
        assert x.is_contiguous(), "the kernel reads rows that lie side by side"
        assert (x.dtype, x.shape[1]) == (self._dtype, self._in), "the kernel reads other rows"
        num_rows = len(x)
        result = x.new_empty(num_rows, self._out)
        arranged = torch.empty(num_rows * (self._in + 1), dtype=torch.float32)
        self._kernels.multiply(
            x.data_ptr(), self._packed.data_ptr(), None if self._bias is None else self._bias.data_ptr(),
            result.data_ptr(), arranged.data_ptr(), num_rows, self._in, self._out,
        )  # fmt: skip
        return result


class OneDnnLinear:
    """The same in bfloat16 by oneDNN, through the operators that torch's compiler uses to freeze weights."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_ROWS)
        self._bias = bias

    def multiply(self, x: Tensor) -> Tensor:
        """x: [num_rows, in] → [num_rows, out] in x's dtype"""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return product


def pack_linear(kernels: ctypes.CDLL, weight: Tensor, bias: Tensor | None) -> PackedLinear | OneDnnLinear:
    """Returns this CPU's fastest product for a weight [out, in] and a bias [out]."""
    if weight.dtype is torch.bfloat16 and kernels.has_bfloat16_products() and _has_onednn():
        return OneDnnLinear(weight, bias)
    return PackedLinear(kernels, weight, bias)


def _has_onednn() -> bool:
    """Whether this build of torch has oneDNN's products of bfloat16."""
    has: bool = (
        torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
    return has
