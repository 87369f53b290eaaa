"""Chooses the kernel of a layer's product of 8-bit floats: the library's, or one of this package with a tiling.

The product sweeps of `make bench-gpu` time them on a device by the number of rows, and record the fastest: see
tuned_tilings. A product that was not timed uses quantized_linear, or the persistent kernel if its weight is in blocks:
the library has no such product.
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


# Of weights in blocks that were not timed. Gate and up are two accumulators, so their tiles have half the columns. All
# compile for sm_90 and sm_100 without spills; which is the fastest has not been measured.
BLOCK_CHOICE = ProductChoice(
    (64, LARGEST), (PersistentTiling(64, 128, BLOCK, 4, 4, 2), PersistentTiling(128, 128, BLOCK, 8, 4, 1))
)
GATED_BLOCK_CHOICE = ProductChoice(
    (64, LARGEST), (PersistentTiling(64, 64, BLOCK, 4, 4, 2), PersistentTiling(128, 64, BLOCK, 8, 4, 1))
)


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


def untimed_block_choice(kernel: str, *, columns: int, inner: int) -> ProductChoice:
    """Returns the choices for a weight in blocks that was not timed, on a device that has persistent kernels."""
    if inner % ROW_ALIGNMENT or (kernel == GATED and columns % BLOCK):
        return ProductChoice()
    return GATED_BLOCK_CHOICE if kernel == GATED else BLOCK_CHOICE


def _fits_blocks(tiling: ProductTiling) -> bool:
    return tiling.inner == BLOCK and BLOCK % tiling.columns == 0


def product_tiling(kernel: str, fields: Mapping[str, int]) -> ProductTiling:
    """Returns the tiling of an entry; only that of a persistent kernel has `programs`. Raises ValueError if the fields
    are not those of a tiling."""
    try:
        return PersistentTiling(**fields) if "programs" in fields else Fp8Tiling(**fields)
    except TypeError as error:
        raise ValueError(f"a tiling of {kernel} has other fields than {sorted(fields)}: {error}") from None
