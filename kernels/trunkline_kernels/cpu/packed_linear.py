"""Matrix products with weights that were laid out for them once.

torch's linear() has oneDNN or the BLAS rearrange the weights in every call. Here they are rearranged when the model is
loaded, by the operators with which torch's own compiler freezes weights; on AVX-512 that makes small products two to
three times as fast (bench/log.md).
"""

import torch
from torch import Tensor

# The rearrangement asks for a number of rows; one made for 64 was the fastest at every number of rows that was tried.
TYPICAL_ROWS = 64


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build of torch has the operators for this type."""
    return (
        dtype in (torch.float32, torch.bfloat16)
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and (dtype is torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


class PackedLinear:
    """x @ weight.T + bias.  weight: [out, in]"""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_ROWS)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_rows, in] → [num_rows, out]"""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return product
