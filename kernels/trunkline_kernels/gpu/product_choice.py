"""Which kernel computes a product of a layer: the library's, or one of our own with some tiling. The product sweeps of
`make bench-gpu` time them on a device, by the number of rows, and write down the winner: see tuned_tilings. What has
not been timed goes the library's way, whose products are fast everywhere; with 8-bit floats it goes our own way.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from trunkline_kernels.gpu.gated_linear import GatedTiling
from trunkline_kernels.gpu.persistent_linear import PersistentTiling
from trunkline_kernels.gpu.quantized_linear import FP8, Fp8Tiling
from trunkline_kernels.gpu.tuned_tilings import GATED, ProductKey, chosen_table, name_of

# An own kernel that wins by less than this may as well have been lucky.
LEAST_GAIN = 1.03

ProductTiling = GatedTiling | PersistentTiling | Fp8Tiling


@dataclass(frozen=True, slots=True)
class ProductChoice:
    """For each number of rows that was timed, in order, the tiling that won; None: the library won."""

    rows: tuple[int, ...] = ()
    tilings: tuple[ProductTiling | None, ...] = ()

    def tiling(self, rows: int) -> ProductTiling | None:
        """For so many rows: that of the next number of rows that was timed. None: the library won, or nothing was
        timed."""
        at = bisect_left(self.rows, rows)
        return self.tilings[at] if at < len(self.rows) else None

    def library_won(self, rows: int) -> bool:
        """Whether the library was timed for so many rows, and was the fastest."""
        return rows <= max(self.rows, default=-1) and self.tiling(rows) is None


def product_choice(kernel: str, *, device: str, columns: int, inner: int, dtype: torch.dtype) -> ProductChoice:
    """What the table says of a product on a device. Raises ValueError where it holds something else than tilings.

    kernel: one of tuned_tilings.PRODUCTS; device: as torch names it; columns: of the result; dtype: of the weight
    """
    found = {
        key.rows: product_tiling(kernel, name_of(dtype), fields) if fields else None
        for key, fields in chosen_table().items()
        if key == ProductKey(kernel, device, getattr(key, "rows", 0), columns, inner, name_of(dtype))
    }
    timed = tuple(sorted(found))
    return ProductChoice(timed, tuple(found[rows] for rows in timed))


def product_tiling(kernel: str, dtype: str, fields: Mapping[str, int]) -> ProductTiling:
    """An entry's tiling: `programs` are what a persistent kernel alone has. Raises ValueError where it is none.

    dtype: of the weight, as the table has it
    """
    try:
        if "programs" not in fields and dtype == name_of(FP8):
            return Fp8Tiling(**fields)
        if "programs" not in fields and kernel == GATED:
            return GatedTiling(**fields)
        return PersistentTiling(**fields)
    except TypeError as error:
        raise ValueError(f"a tiling of {kernel} has other fields than {sorted(fields)}: {error}") from None
