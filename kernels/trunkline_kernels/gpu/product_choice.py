"""Chooses the kernel of a layer's product of 8-bit floats: the library's, or one of this package with a tiling.

The product sweeps of `make bench-gpu` time them on a device by the number of rows, and record the fastest: see
tuned_tilings. Where a device has persistent kernels, a product that was not timed uses them for few rows, and the
library for many; elsewhere quantized_linear.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

from trunkline_kernels.gpu.persistent_linear import ROW_ALIGNMENT, PersistentTiling
from trunkline_kernels.gpu.quantized_linear import Fp8Tiling
from trunkline_kernels.gpu.tuned_tilings import GATED, LARGEST, ProductKey, chosen_table, name_of
from trunkline_kernels.quantized_weight import BLOCK, FP8

# If a kernel of this package is faster by a smaller factor, the difference may be noise.
LEAST_GAIN = 1.03

ProductTiling = PersistentTiling | Fp8Tiling
WEIGHT_TYPES = {False: name_of(FP8), True: f"{name_of(FP8)} in blocks"}  # in a ProductKey, by whether it is in blocks


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


FEW_ROWS = 128  # up to so many, a persistent kernel was faster than the library on an H100 and an H200
# Tilings for few and for many rows, by whether a product is gated and whether its weight is in blocks: the fastest, or
# nearly, for most shapes on an H200. All compile for sm_90 and sm_100 without spills.
UNTIMED = {
    (False, False): (PersistentTiling(64, 128, 256, 4, 4, 1), PersistentTiling(128, 128, 128, 8, 4, 1)),
    (False, True): (PersistentTiling(64, 64, BLOCK, 4, 4, 3), PersistentTiling(128, 128, BLOCK, 8, 4, 1)),
    (True, False): (PersistentTiling(64, 64, 128, 4, 4, 2), PersistentTiling(128, 128, 128, 8, 4, 1)),
    (True, True): (PersistentTiling(64, 64, BLOCK, 4, 4, 2), PersistentTiling(128, 64, BLOCK, 8, 4, 1)),
}


def product_choice(kernel: str, *, device: str, columns: int, inner: int, in_blocks: bool = False) -> ProductChoice:
    """Returns the table's choices for a product on a device. Raises ValueError if an entry is not a tiling.

    kernel: one of tuned_tilings.PRODUCTS; device: as torch reports it; columns: of the result; in_blocks: the weight is
    """
    found = {
        key.rows: product_tiling(kernel, fields) if fields else None
        for key, fields in chosen_table().items()
        if key == ProductKey(kernel, device, getattr(key, "rows", 0), columns, inner, WEIGHT_TYPES[in_blocks])
    }
    timed = tuple(sorted(found))
    if in_blocks and (wrong := [each for each in found.values() if each and not _fits_blocks(each)]):
        raise ValueError(f"a tiling of {kernel} with a weight in blocks of {BLOCK} is {wrong[0]}")
    return ProductChoice(timed, tuple(found[rows] for rows in timed))


def untimed_choice(kernel: str, *, columns: int, inner: int, in_blocks: bool, library: bool) -> ProductChoice:
    """Returns the choices for a product that was not timed, on a device that has persistent kernels.

    library: the library has this product
    """
    if inner % ROW_ALIGNMENT or (in_blocks and kernel == GATED and columns % BLOCK):
        return ProductChoice()
    few, many = UNTIMED[kernel == GATED, in_blocks]
    return ProductChoice((FEW_ROWS, LARGEST), (few, None if library else many))


def _fits_blocks(tiling: ProductTiling) -> bool:
    return tiling.inner == BLOCK and BLOCK % tiling.columns == 0


def product_tiling(kernel: str, fields: Mapping[str, int]) -> ProductTiling:
    """Returns the tiling of an entry; only that of a persistent kernel has `programs`. Raises ValueError if the fields
    are not those of a tiling."""
    try:
        return PersistentTiling(**fields) if "programs" in fields else Fp8Tiling(**fields)
    except TypeError as error:
        raise ValueError(f"a tiling of {kernel} has other fields than {sorted(fields)}: {error}") from None
