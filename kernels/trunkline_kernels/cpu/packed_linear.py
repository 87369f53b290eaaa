"""Matrix products with weights that are rearranged once.

In torch's linear(), oneDNN or the BLAS rearranges the weights in every call. Here they are rearranged when the model is
loaded, by the operators that torch's compiler uses to freeze weights. On AVX-512 this makes small products two to three
times as fast (bench/log.md).
"""

import torch
from torch import Tensor

# The rearrangement takes a number of rows. 64 was the fastest for products of every number of rows that was tried.
TYPICAL_ROWS = 64


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build of torch has the operators for this dtype."""
    return (
        dtype in (torch.float32, torch.bfloat16)
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and (dtype is torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


class PackedLinear:
    """Computes x @ weight.T + bias with a rearranged copy of the weight. weight: [out, in]; bias: [out]

    Reference: torch.nn.functional.linear.
    """

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_ROWS)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_rows, in] → [num_rows, out] in x's dtype"""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return product
