"""Chooses the kernel of a layer's product of 8-bit floats: the library's, or one of this package with a tiling.

The product sweep of `make bench-gpu` times them on a device by the number of rows, and records the fastest: see
tuned_tilings. A product that was not timed uses quantized_linear.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

from trunkline_kernels.gpu.persistent_linear import PersistentTiling
from trunkline_kernels.gpu.quantized_linear import Fp8Tiling
from trunkline_kernels.gpu.tuned_tilings import ProductKey, chosen_table, name_of
from trunkline_kernels.quantized_weight import FP8

# If a kernel of this package is faster by a smaller factor, the difference may be noise.
LEAST_GAIN = 1.03

ProductTiling = PersistentTiling | Fp8Tiling


@dataclass(frozen=True, slots=True)
class ProductChoice:
    """The fastest tiling for each number of rows that was timed."""

    rows: tuple[int, ...] = ()  # ascending
    tilings: tuple[ProductTiling | None, ...] = ()  # None: the library was faster

    def tiling(self, rows: int) -> ProductTiling | None:
        """Returns the tiling of the next larger timed number of rows. None: the library was faster, or nothing was
        timed."""
        at = bisect_left(self.rows, rows)
        return self.tilings[at] if at < len(self.rows) else None

    def library_won(self, rows: int) -> bool:
        """Whether products of this number of rows were timed, and the library was the fastest."""
        return rows <= max(self.rows, default=-1) and self.tiling(rows) is None


def product_choice(kernel: str, *, device: str, columns: int, inner: int) -> ProductChoice:
    """Returns the table's choices for a product on a device. Raises ValueError if an entry is not a tiling.

    kernel: one of tuned_tilings.PRODUCTS; device: as torch reports it; columns: of the result
    """
    found = {
        key.rows: product_tiling(kernel, fields) if fields else None
        for key, fields in chosen_table().items()
        if key == ProductKey(kernel, device, getattr(key, "rows", 0), columns, inner, name_of(FP8))
    }
    timed = tuple(sorted(found))
    return ProductChoice(timed, tuple(found[rows] for rows in timed))


def product_tiling(kernel: str, fields: Mapping[str, int]) -> ProductTiling:
    """Returns the tiling of an entry; only that of a persistent kernel has `programs`. Raises ValueError if the fields
    are not those of a tiling."""
    try:
        return PersistentTiling(**fields) if "programs" in fields else Fp8Tiling(**fields)
    except TypeError as error:
        raise ValueError(f"a tiling of {kernel} has other fields than {sorted(fields)}: {error}") from None
