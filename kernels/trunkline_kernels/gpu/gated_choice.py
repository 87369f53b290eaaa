"""Which way the first half of a feed-forward layer goes: gated_linear with some tiling, or the library's product and
silu_and_mul. The product sweep of `make bench-gpu` times both on a device, by the number of rows, and writes down the
winner: see tuned_tilings. What has not been timed goes the library's way, whose products are fast everywhere.
"""

from bisect import bisect_left
from dataclasses import dataclass

import torch

from trunkline_kernels.gpu.gated_linear import GatedTiling
from trunkline_kernels.gpu.tuned_tilings import GATED, ProductKey, chosen_table, name_of

# An own kernel that wins by less than this may as well have been lucky.
LEAST_GAIN = 1.03


@dataclass(frozen=True, slots=True)
class GatedChoice:
    """For each number of rows that was timed, in order, the tiling that won; None: the library won."""

    rows: tuple[int, ...] = ()
    tilings: tuple[GatedTiling | None, ...] = ()

    def tiling(self, rows: int) -> GatedTiling | None:
        """For so many rows: that of the next number of rows that was timed. None: the library's way."""
        at = bisect_left(self.rows, rows)
        return self.tilings[at] if at < len(self.rows) else None


def gated_choice(*, device: str, columns: int, inner: int, dtype: torch.dtype) -> GatedChoice:
    """What the table says of a device. Raises ValueError where it holds something else than tilings.

    device: as torch names it; columns: of gate and up, each
    """
    found = {
        key.rows: GatedTiling(**fields) if fields else None
        for key, fields in chosen_table().items()
        if key == ProductKey(GATED, device, getattr(key, "rows", 0), columns, inner, name_of(dtype))
    }
    timed = tuple(sorted(found))
    return GatedChoice(timed, tuple(found[rows] for rows in timed))
