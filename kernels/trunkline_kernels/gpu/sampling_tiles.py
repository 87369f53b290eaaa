"""Divides a row's logits into tiles. Many programs find each tile's highest logit and mass; one program per row then
searches a list of tiles.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from trunkline_kernels.gpu.device_rows import SAMPLING_COLUMNS, TEMPERATURE, DeviceRows

SMALLEST_TILE = 256  # logits
MOST_TILES = 1024  # of a row: one program processes all their peaks at once
RUN = 16  # tiles of one program
LARGEST = tl.constexpr(3.4028234e38)


@triton.jit
def order_of(x):
    """Returns uint32 numbers that order like the float32 numbers `x`."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    return tl.where(bits < 0, ~bits, bits | -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def _tile_peaks(
    logits,  # [num_samples, vocab] float32
    peaks,  # [num_samples, num_tiles] float32 ← the highest logit; infinity if one is NaN
    masses,  # [num_samples, num_tiles] float32 ← sum of exp((x - peak) / temperature)
    samples,  # [num_samples, 2] int32: row, position of the new token
    sampling,  # [num_rows, COLUMNS] int32
    vocab,
    num_tiles,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    RUN: tl.constexpr,
):  # fmt: skip
    """Grid: (runs of tiles, num_samples)."""
    index = tl.program_id(1).to(tl.int64)
    number = tl.program_id(0) * RUN + tl.arange(0, RUN)
    at = number[:, None] * TILE + tl.arange(0, TILE)[None, :]
    known = at < vocab
    x = tl.load(logits + index * vocab + at, mask=known, other=float("-inf"))
    columns = sampling + tl.load(samples + index * 2).to(tl.int64) * COLUMNS
    heat = tl.load(columns + TEMPERATURE).to(tl.float32, bitcast=True)
    scale = 1.0 / tl.where(heat > 0, heat, 1.0)
    broken = tl.max((x != x).to(tl.int32), axis=1)
    peak = tl.where(broken > 0, float("inf"), tl.max(x, axis=1))
    anchor = tl.where(tl.abs(peak) <= LARGEST, peak, 0.0)
    mass = tl.sum(tl.where(known, tl.exp((x - anchor[:, None]) * scale), 0.0), axis=1)
    there = number < num_tiles
    tl.store(peaks + index * num_tiles + number, peak, mask=there)
    tl.store(masses + index * num_tiles + number, mass, mask=there)


@triton.jit
def count_cut(order, there, count):
    """Returns the highest cut that at least `count` of the numbers reach, or all of them if they are fewer.

    order: uint32 from order_of; there: which of them exist
    """
    cut = tl.full([], 0, tl.uint32)
    for step in tl.static_range(32):
        higher = cut | (tl.full([], 1, tl.uint32) << (31 - step))
        reached = tl.sum((there & (order >= higher)).to(tl.int32))
        cut = tl.where(reached >= count, higher, cut)
    return cut


@triton.jit
def list_tiles(listed, number, chosen):
    """Writes the numbers of the chosen tiles in ascending order, and returns their count."""
    tl.debug_barrier()  # other threads may still be reading the previous list
    place = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    tl.store(listed + place, number, mask=chosen)
    tl.debug_barrier()  # other threads of the program read it
    return tl.sum(chosen.to(tl.int32))


@triton.jit
def tiled_load(row, listed, start, count, vocab, num_tiles, TILE: tl.constexpr, TILES: tl.constexpr):
    """Returns token ids and logits of TILES listed tiles, [TILES * TILE] each. Ids past the vocabulary are padding."""
    number = start + tl.arange(0, TILES)
    tile = tl.load(listed + number, mask=number < count, other=num_tiles)
    at = tl.reshape(tile[:, None] * TILE + tl.arange(0, TILE)[None, :], [TILES * TILE])
    return at, tl.load(row + at, mask=at < vocab, other=float("-inf"))


@triton.jit
def listed_mass(row, listed, count, floor, scale, highest, vocab, num_tiles, TILE: tl.constexpr, TILES: tl.constexpr):
    """Returns the mass, relative to the peak, of listed tokens that order at or above the floor."""
    total = tl.full([], 0.0, tl.float32)
    for start in tl.range(0, count, TILES):
        at, x = tiled_load(row, listed, start, count, vocab, num_tiles, TILE, TILES)
        total += tl.sum(tl.where((at < vocab) & (order_of(x) >= floor), tl.exp((x - highest) * scale), 0.0))
    return total


@triton.jit
def highest_cut(
    row,  # logits of the row
    listed, count,  # tiles
    scale,  # 1 / temperature
    highest,  # of the logits
    floor,  # uint32: tokens that order below it do not count
    target,  # float32
    MASS: tl.constexpr,  # weights are probabilities relative to the peak's, else ones
    vocab,
    num_tiles,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """Returns the highest cut for which the weights of tokens that order at or above it reach the target; 0 if none.

    The cut is found four bits at a time, from the highest.
    """
    cut = tl.full([], 0, tl.uint32)
    digit = tl.arange(0, 16).to(tl.uint32)
    for step in tl.static_range(8):
        cuts = cut + (digit << (28 - 4 * step))
        # Summed over the logits once, after the loop.
        sums = tl.zeros([16, TILES * TILE], tl.float32)
        for start in tl.range(0, count, TILES):
            at, x = tiled_load(row, listed, start, count, vocab, num_tiles, TILE, TILES)
            order = order_of(x)
            counts = (at < vocab) & (order >= floor)
            weight = tl.where(counts, tl.exp((x - highest) * scale) if MASS else 1.0, 0.0)
            sums += tl.where(order[None, :] >= cuts[:, None], weight[None, :], 0.0)
        weights = tl.sum(sums, axis=1)
        chosen = tl.max(tl.where(weights >= target, tl.arange(0, 16), 0))
        cut += chosen.to(tl.uint32) << (28 - 4 * step)
    return cut


def tile_size(vocab: int) -> int:
    """Returns the number of logits of a tile, for rows of `vocab` logits."""
    tile: int = max(SMALLEST_TILE, triton.next_power_of_2(triton.cdiv(vocab, MOST_TILES)))
    return tile


@dataclass(frozen=True, slots=True)
class SampleRoom:
    """Memory for the tiles of each sample during one call of sample()."""

    tile: int  # logits of a tile
    peaks: Tensor  # [num_samples, num_tiles] float32
    masses: Tensor  # [num_samples, num_tiles] float32
    listed: Tensor  # [num_samples, num_tiles] int32: numbers of the tiles that are searched
    highest: Tensor  # [num_samples] float32

    @classmethod
    def allocate(cls, num_samples: int, vocab: int, device: torch.device) -> "SampleRoom":
        """Allocates room for rows of `vocab` logits."""
        tile = tile_size(vocab)
        shape = (num_samples, triton.cdiv(vocab, tile))
        peaks, masses = (torch.empty(shape, dtype=torch.float32, device=device) for _ in range(2))
        listed = torch.empty(shape, dtype=torch.int32, device=device)
        return cls(tile, peaks, masses, listed, torch.empty(num_samples, dtype=torch.float32, device=device))

    @property
    def num_tiles(self) -> int:
        return self.peaks.shape[1]


def tile_peaks(logits: Tensor, samples: Tensor, rows: DeviceRows, room: SampleRoom) -> None:
    """Fills in the peaks and masses of `room`.

    logits: [num_samples, vocab] float32; samples: [num_samples, 2] int32, (row, position of the new token)
    """
    num_samples, vocab = logits.shape
    _tile_peaks[(triton.cdiv(room.num_tiles, RUN), num_samples)](
        logits, room.peaks, room.masses, samples, rows.sampling, vocab, room.num_tiles, SAMPLING_COLUMNS.value,
        room.tile, RUN, num_warps=8,
    )  # fmt: skip
