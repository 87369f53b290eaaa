"""Which kernel computes a product of a layer: the library's, or one of our own with some tiling. The product sweep of
`make bench-gpu` times them on a device, by the number of rows, and writes down the winner: see tuned_tilings. What has
not been timed goes the library's way, whose products are fast everywhere.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from trunkline_kernels.gpu.gated_linear import GatedTiling
from trunkline_kernels.gpu.persistent_linear import PersistentTiling
from trunkline_kernels.gpu.tuned_tilings import GATED, ProductKey, chosen_table, name_of

# An own kernel that wins by less than this may as well have been lucky.
LEAST_GAIN = 1.03

ProductTiling = GatedTiling | PersistentTiling


@dataclass(frozen=True, slots=True)
class ProductChoice:
    """For each number of rows that was timed, in order, the tiling that won; None: the library won."""

    rows: tuple[int, ...] = ()
    tilings: tuple[ProductTiling | None, ...] = ()

    def tiling(self, rows: int) -> ProductTiling | None:
        """For so many rows: that of the next number of rows that was timed. None: the library's way."""
        at = bisect_left(self.rows, rows)
        return self.tilings[at] if at < len(self.rows) else None


def product_choice(kernel: str, *, device: str, columns: int, inner: int, dtype: torch.dtype) -> ProductChoice:
    """What the table says of a product on a device. Raises ValueError where it holds something else than tilings.

    kernel: one of tuned_tilings.PRODUCTS; device: as torch names it; columns: of the result
    """
    found = {
        key.rows: product_tiling(kernel, fields) if fields else None
        for key, fields in chosen_table().items()
        if key == ProductKey(kernel, device, getattr(key, "rows", 0), columns, inner, name_of(dtype))
    }
    timed = tuple(sorted(found))
    return ProductChoice(timed, tuple(found[rows] for rows in timed))


def product_tiling(kernel: str, fields: Mapping[str, int]) -> ProductTiling:
    """An entry's tiling: `programs` are what a persistent kernel alone has. Raises ValueError where it is none."""
    try:
        if kernel == GATED and "programs" not in fields:
            return GatedTiling(**fields)
        return PersistentTiling(**fields)
    except TypeError as error:
        raise ValueError(f"a tiling of {kernel} has other fields than {sorted(fields)}: {error}") from None
