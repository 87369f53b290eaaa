"""Divides the work of decode_attention on the device, from the contexts of the step.

The tiles of keys of all contexts form one list, and each of a fixed number of ranges takes an equal part of it. All
programs read the same amount and run at once for any contexts, so one captured graph serves all contexts. If a context
crosses the end of a range, the last of its programs to finish merges its results.

Sources of the even division: stream-K (Osama et al., 2023); FlashInfer's plan for decodes (Ye et al., 2024).
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from trunkline_kernels.gpu.decode_tiling import DecodeTiling

MOST_WARPS = 16
SEQUENCES_OF_WARP = 256


@triton.jit(do_not_specialize=["num_seqs", "most_ranges", "window"])
def _plan_ranges(
    context_lens,  # [num_seqs] int32; 0: not computed by decode_attention
    prefixes,  # [num_seqs, 3] int32: column 0 is the number of tokens that shared_prefix has computed
    tile_starts,  # [num_seqs] int32 ← number of tiles of all sequences before each one
    pieces,  # [num_seqs, 2] int32 ← first range, number of ranges of each sequence
    ranges,  # [most_ranges, 4] int32 ← first sequence, last sequence, first tile, end; last < first: empty range
    num_seqs,
    most_ranges,
    window,  # only tiles with some of this many last positions count; 0: all
    TILE_KEYS: tl.constexpr,
    FEWEST_TILES: tl.constexpr,  # fewest tiles of a range; a step with fewer has one range
    PADDED_SEQS: tl.constexpr,
):  # fmt: skip
    """Grid: (1 + most_ranges). The first program writes tile_starts and pieces, each other one its range."""
    number = tl.program_id(0) - 1
    index = tl.arange(0, PADDED_SEQS)
    known = index < num_seqs
    lens = tl.load(context_lens + index, mask=known, other=0) - tl.load(prefixes + index * 3, mask=known, other=0)
    hidden = tl.where(window > 0, tl.maximum(lens - window, 0), 0) // TILE_KEYS
    counts = (lens + TILE_KEYS - 1) // TILE_KEYS - hidden
    ends = tl.cumsum(counts, axis=0)
    total = tl.sum(counts)
    num_ranges = tl.minimum(tl.maximum(total // FEWEST_TILES, 1), most_ranges)
    if number < 0:
        tl.store(tile_starts + index, ends - counts, mask=known)
        # Range r begins at tile r * total // num_ranges; the next lines invert this.
        some = tl.maximum(total, 1).to(tl.int64)
        first = ((ends - counts + 1).to(tl.int64) * num_ranges - 1) // some
        last = (ends.to(tl.int64) * num_ranges - 1) // some
        tl.store(pieces + index * 2, first.to(tl.int32), mask=known)
        tl.store(pieces + index * 2 + 1, tl.where(counts > 0, last - first + 1, 0).to(tl.int32), mask=known)
    else:
        start = (number.to(tl.int64) * total // num_ranges).to(tl.int32)
        end = ((number + 1).to(tl.int64) * total // num_ranges).to(tl.int32)
        exists = (number < num_ranges) & (end > start)
        first_sequence = tl.sum((known & (ends <= start)).to(tl.int32))
        last_sequence = tl.sum((known & (ends < end)).to(tl.int32))
        row = ranges + number * 4
        tl.store(row, tl.where(exists, first_sequence, 0))
        tl.store(row + 1, tl.where(exists, last_sequence, -1))
        tl.store(row + 2, tl.where(exists, start, 0))
        tl.store(row + 3, tl.where(exists, end, 0))


@dataclass(frozen=True, slots=True)
class Division:
    """How a step's contexts are divided, for all layers with the same window."""

    tile_starts: Tensor  # [max_seqs] int32: number of tiles of all sequences before each one
    pieces: Tensor  # [max_seqs, 2] int32: first range, number of ranges of each sequence
    ranges: Tensor  # [num_ranges, 4] int32: first sequence, last sequence, first tile, end; last < first: empty range


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """How a step's contexts are divided among ranges, and room for the results of contexts in several ranges.

    The piece of sequence s in range r has the index s + r, which is unique: s or r grows from one piece to the next.
    """

    tiling: DecodeTiling
    num_ranges: int
    divisions: dict[int | None, Division]  # by window; None: layers without one
    partial_out: Tensor  # [max_seqs + num_ranges, num_heads, head_dim] float32
    partial_stats: Tensor  # [max_seqs + num_ranges, num_heads, 2] float32
    arrivals: Tensor  # [max_seqs, num_kv_heads] int32: zero, except while decode_attention runs

    @classmethod
    def allocate(
        cls,
        *,
        max_seqs: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        num_multiprocessors: int,
        tiling: DecodeTiling,
        device: torch.device,
        windows: Iterable[int | None] = (None,),
    ) -> "DecodePlan":
        """Allocates a plan for steps of up to `max_seqs` sequences. A range has a program for each KV head, so the
        number of ranges is the number of programs that the tiling allows on the device, divided by the KV heads.

        windows: of the layers
        """
        num_ranges = max(1, tiling.programs * num_multiprocessors // num_kv_heads)

        def numbers(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.int32, device=device)

        def partial(width: int) -> Tensor:
            return torch.empty(max_seqs + num_ranges, num_heads, width, dtype=torch.float32, device=device)

        divisions = {
            window: Division(numbers(max_seqs), numbers(max_seqs, 2), numbers(num_ranges, 4))
            for window in dict.fromkeys(windows)
        }
        arrivals = torch.zeros(max_seqs, num_kv_heads, dtype=torch.int32, device=device)
        return cls(tiling, num_ranges, divisions, partial(head_dim), partial(2), arrivals)

    def update(self, context_lens: Tensor, prefixes: Tensor) -> None:
        """Divides the contexts of a step, on the device.

        context_lens: [num_seqs] int32; 0: not computed by decode_attention
        prefixes: [num_seqs, 3] int32, of SharedPrefixes
        """
        fewest_tiles = max(1, self.tiling.shortest // self.tiling.keys)
        for window, division in self.divisions.items():
            padded_seqs = triton.next_power_of_2(len(division.tile_starts))
            _plan_ranges[(1 + self.num_ranges,)](
                context_lens, prefixes, division.tile_starts, division.pieces, division.ranges, len(context_lens),
                self.num_ranges, window or 0, self.tiling.keys, fewest_tiles, padded_seqs,
                num_warps=min(max(padded_seqs // SEQUENCES_OF_WARP, 1), MOST_WARPS),
            )  # fmt: skip
