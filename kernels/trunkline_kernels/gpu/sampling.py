"""Samples tokens from logits on the device: top-k, top-p, min-p, a draw.

Nothing passes through the host: parameters and history are in the rows on the device. A draw is the Gumbel-max trick
with noise that depends only on seed, position and token (gumbel_noise.py). top_k and top_p become a threshold on the
logits, found by bisection over the bits of the numbers instead of a sort. Of logits equal to top_k's threshold, all are
kept; of logits equal to top_p's, those of the lowest token ids, as many as reach p.

All logits are read once, by many programs per row, for the peak (highest logit) and the mass of each tile
(sampling_tiles.py). The k-th highest peak is a lower bound for the k-th highest logit, so the tokens that top_k keeps
are in the few tiles whose peaks reach it. The nucleus of top_p is searched in the tiles with the highest peaks, in more
of them until their mass suffices. For rows without top_k and top_p, many programs draw from all tiles.

The row's highest logit is subtracted before scaling. The highest is then 0 and the others are negative, so an overflow
never changes a value that is compared or drawn, and the most likely token always stays.

Reference: trunkline_worker.runner.sampler and trunkline_worker.step.sampling_key, which define the parameters.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trunkline_kernels.gpu.device_rows import (
    MIN_P,
    SAMPLING_COLUMNS,
    SEED_HIGH,
    SEED_LOW,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    DeviceRows,
)
from trunkline_kernels.gpu.gumbel_noise import gumbel_noise, position_key
from trunkline_kernels.gpu.sampling_tiles import (
    SampleRoom,
    count_cut,
    highest_cut,
    list_tiles,
    listed_mass,
    order_of,
    tile_peaks,
    tiled_load,
)

# Listed tiles that a program of four warps processes at once: with sixteen cuts each, or with none. More of them would
# need more registers than some chips have.
CUT_TILES, DRAW_TILES = 1, 8
RUN = 16  # tiles per program if a row is drawn from all tiles
NUCLEUS_TILES = 16  # tiles in which a nucleus is searched first; then in eight times as many, and so on
NUCLEUS_FACTOR = 8
# Noise cannot make up for a larger difference of shifted and scaled logits: see sampling_key.NOISE_SPREAD.
NOISE_SPREAD = tl.constexpr(26.1)
LARGEST = tl.constexpr(3.4028234e38)


@triton.jit
def _least(share):
    """Returns the lowest shifted and scaled logit that can be drawn, by min_p and by the spread of the noise."""
    return tl.maximum(-NOISE_SPREAD, tl.log(tl.maximum(share, 1e-30)))


@triton.jit
def _choose(
    logits,  # [num_samples, vocab] float32
    peaks, masses,  # [num_samples, num_tiles] float32, of tile_peaks
    listed,  # [num_samples, num_tiles] int32: scratch memory
    highest_of,  # [num_samples] float32 ← the row's highest logit if _draw draws from all its tokens; else NaN
    chosen,  # [num_samples] int64 ← -1 if the highest logit is infinite or NaN, -2 if it is -inf
    samples,  # [num_samples, 2] int32: row, position of the new token
    sampling,  # [num_rows, COLUMNS] int32: see device_rows
    tokens,  # [num_rows, token_width] int32 ← at the position; 0 if the logits are not finite
    vocab,
    num_tiles,
    token_width,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    PADDED_TILES: tl.constexpr,
    CUT_TILES: tl.constexpr,
    DRAW_TILES: tl.constexpr,
    NUCLEUS_TILES: tl.constexpr,
    NUCLEUS_FACTOR: tl.constexpr,
):  # fmt: skip
    """Chooses the most likely token, or draws from the tokens that top_k and top_p keep. Grid: (num_samples)."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * vocab
    own = listed + index * num_tiles
    number = tl.arange(0, PADDED_TILES)
    there = number < num_tiles
    peak = tl.load(peaks + index * num_tiles + number, mask=there, other=float("-inf"))
    highest = tl.max(peak)
    # A tile with a NaN has an infinite peak.
    finite = tl.abs(highest) <= LARGEST
    first = tl.argmax(peak, axis=0, tie_break_left=True)
    tile_at = first * TILE + tl.arange(0, TILE)
    in_tile = tl.load(row + tile_at, mask=tile_at < vocab, other=float("-inf"))
    best = first * TILE + tl.argmax(in_tile, axis=0, tie_break_left=True)
    table_row = tl.load(samples + index * 2).to(tl.int64)
    position = tl.load(samples + index * 2 + 1)
    columns = sampling + table_row * COLUMNS
    heat = tl.load(columns + TEMPERATURE).to(tl.float32, bitcast=True)
    k = tl.load(columns + TOP_K)
    p = tl.load(columns + TOP_P).to(tl.float32, bitcast=True)
    by_count = (k > 0) & (k < vocab)
    draws = finite & (heat > 0)
    cuts = by_count | (p < 1.0)
    tl.store(highest_of + index, tl.where(draws & (cuts == 0), highest, float("nan")))
    if draws & cuts:
        scale = 1.0 / heat
        order = order_of(peak)
        total = tl.sum(
            tl.where(there, tl.load(masses + index * num_tiles + number, mask=there, other=0.0), 0.0)
            * tl.where(peak == float("-inf"), 0.0, tl.exp((peak - highest) * scale))
        )
        floor = tl.full([], 0, tl.uint32)
        count = tl.full([], 0, tl.int32)
        if by_count:
            floor = count_cut(order, there, k)
            count = list_tiles(own, number, there & (order >= floor))
        else:
            wanted = tl.full([], NUCLEUS_TILES, tl.int32)
            searching = tl.full([], 1, tl.int32)
            while searching > 0:
                floor = tl.where(wanted < num_tiles, count_cut(order, there, wanted), 0).to(tl.uint32)
                count = list_tiles(own, number, there & (order >= floor))
                mass = listed_mass(row, own, count, floor, scale, highest, vocab, num_tiles, TILE, DRAW_TILES)
                searching = ((mass < p * total) & (wanted < num_tiles)).to(tl.int32)
                wanted *= NUCLEUS_FACTOR
        cut = tl.full([], 0, tl.uint32)
        equals = tl.full([], 2147483647, tl.int32)  # number of tokens exactly at the cut that are kept
        if by_count:
            cut = highest_cut(
                row, own, count, scale, highest, cut, k.to(tl.float32), False, vocab, num_tiles, TILE, CUT_TILES
            )
            total = listed_mass(row, own, count, cut, scale, highest, vocab, num_tiles, TILE, DRAW_TILES)
        if p < 1.0:
            # The most likely token always stays.
            target = tl.maximum(p * total, 1e-30)
            nucleus = highest_cut(row, own, count, scale, highest, cut, target, True, vocab, num_tiles, TILE, CUT_TILES)
            if (nucleus >= cut) & (nucleus > 0):
                cut = nucleus
                above = tl.full([], 0.0, tl.float32)
                weight = tl.full([], 0.0, tl.float32)  # of a token at the cut
                for start in tl.range(0, count, DRAW_TILES):
                    at, x = tiled_load(row, own, start, count, vocab, num_tiles, TILE, DRAW_TILES)
                    each = tl.exp((x - highest) * scale)
                    above += tl.sum(tl.where((at < vocab) & (order_of(x) > cut), each, 0.0))
                    weight = tl.maximum(weight, tl.max(tl.where((at < vocab) & (order_of(x) == cut), each, 0.0)))
                if weight > 0:  # else no token is exactly at the cut
                    equals = tl.minimum(tl.maximum(tl.ceil((target - above) / weight), 1.0), 2.0e9).to(tl.int32)
        least = _least(tl.load(columns + MIN_P).to(tl.float32, bitcast=True))
        low, high = position_key(tl.load(columns + SEED_LOW), tl.load(columns + SEED_HIGH), position)
        passed = tl.full([], 0, tl.int32)  # tokens at the cut, so far
        won = tl.full([], float("-inf"), tl.float32)
        for start in tl.range(0, count, DRAW_TILES):  # tiles are listed in the order of their tokens' ids
            at, x = tiled_load(row, own, start, count, vocab, num_tiles, TILE, DRAW_TILES)
            at_cut = ((at < vocab) & (order_of(x) == cut)).to(tl.int32)
            kept = (order_of(x) > cut) | ((at_cut > 0) & (passed + tl.cumsum(at_cut, axis=0) <= equals))
            passed += tl.sum(at_cut)
            x = (x - highest) * scale
            score = tl.where((at < vocab) & (x >= least) & kept, x + gumbel_noise(low, high, at), float("-inf"))
            here = tl.max(score)
            token = tl.min(tl.where(score == here, at, 2147483647))  # the lowest id of equals
            best = tl.where(here > won, token, best)
            won = tl.maximum(won, here)
    failure = tl.where(highest == float("-inf"), -2, -1)
    tl.store(chosen + index, tl.where(finite, best, failure).to(tl.int64))
    # A token is written even on failure: the next step may run before the failure is handled.
    tl.store(tokens + table_row * token_width + position, tl.where(finite, best, 0), mask=position < token_width)


@triton.jit
def _draw(
    logits,  # [num_samples, vocab] float32
    peaks,  # [num_samples, num_tiles] float32
    highest_of,  # [num_samples] float32, of _choose
    won, best,  # [num_samples, num_runs] float32, int32 ← the highest score of each run of tiles, and its token
    samples, sampling,  # as above
    vocab,
    num_tiles,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    RUN: tl.constexpr,  # tiles
):  # fmt: skip
    """Draws from all tokens of a row, for rows that _choose left to it. Grid: (num_runs, num_samples)."""
    index = tl.program_id(1).to(tl.int64)
    highest = tl.load(highest_of + index)
    if highest != highest:
        return
    columns = sampling + tl.load(samples + index * 2).to(tl.int64) * COLUMNS
    scale = 1.0 / tl.load(columns + TEMPERATURE).to(tl.float32, bitcast=True)
    least = _least(tl.load(columns + MIN_P).to(tl.float32, bitcast=True))
    place = index * tl.num_programs(0) + tl.program_id(0)
    number = tl.program_id(0) * RUN + tl.arange(0, RUN)
    peak = tl.load(peaks + index * num_tiles + number, mask=number < num_tiles, other=float("-inf"))
    if (tl.max(peak) - highest) * scale < least:
        tl.store(won + place, float("-inf"))
        tl.store(best + place, 0)
        return
    position = tl.load(samples + index * 2 + 1)
    low, high = position_key(tl.load(columns + SEED_LOW), tl.load(columns + SEED_HIGH), position)
    at = tl.program_id(0) * RUN * TILE + tl.arange(0, RUN * TILE)
    x = (tl.load(logits + index * vocab + at, mask=at < vocab, other=float("-inf")) - highest) * scale
    score = tl.where((at < vocab) & (x >= least), x + gumbel_noise(low, high, at), float("-inf"))
    tl.store(won + place, tl.max(score))
    tl.store(best + place, tl.program_id(0) * RUN * TILE + tl.argmax(score, axis=0, tie_break_left=True))


@triton.jit
def _pick(
    highest_of,  # [num_samples] float32
    won, best,  # [num_samples, num_runs] float32, int32
    chosen,  # [num_samples] int64 ←
    samples,  # [num_samples, 2] int32
    tokens,  # [num_rows, token_width] int32 ←
    num_runs,
    token_width,
    PADDED_RUNS: tl.constexpr,
):  # fmt: skip
    """Writes the best token of a row's runs, for rows of _draw. Grid: (num_samples)."""
    index = tl.program_id(0).to(tl.int64)
    highest = tl.load(highest_of + index)
    if highest != highest:
        return
    run = tl.arange(0, PADDED_RUNS)
    score = tl.load(won + index * num_runs + run, mask=run < num_runs, other=float("-inf"))
    token = tl.load(best + index * num_runs + tl.argmax(score, axis=0, tie_break_left=True))
    tl.store(chosen + index, token.to(tl.int64))
    position = tl.load(samples + index * 2 + 1)
    place = tl.load(samples + index * 2).to(tl.int64) * token_width + position
    tl.store(tokens + place, token, mask=position < token_width)


def sample(logits: Tensor, samples: Tensor, rows: DeviceRows, *, draws: bool = True) -> Tensor:
    """Samples the next token of each sample, and writes it to its row of `rows` too.

    logits: [num_samples, vocab] float32; samples: [num_samples, 2] int32, (row, position of the new token)
    draws: False if every row's temperature is 0
    → [num_samples] int64; -1: the logits are not finite; -2: all of them are -inf, so no token is left
    """
    num_samples, vocab = logits.shape
    chosen = torch.empty(num_samples, dtype=torch.int64, device=logits.device)
    if not num_samples:
        return chosen
    room = SampleRoom.allocate(num_samples, vocab, logits.device)
    tile_peaks(logits, samples, rows, room)
    num_tiles, width, columns = room.num_tiles, rows.tokens.shape[1], SAMPLING_COLUMNS.value
    padded = triton.next_power_of_2(num_tiles)
    _choose[(num_samples,)](
        logits, room.peaks, room.masses, room.listed, room.highest, chosen, samples, rows.sampling, rows.tokens,
        vocab, num_tiles, width, columns, room.tile, padded, CUT_TILES, DRAW_TILES, NUCLEUS_TILES, NUCLEUS_FACTOR,
        num_warps=4,
    )  # fmt: skip
    if not draws:
        return chosen
    num_runs = triton.cdiv(num_tiles, RUN)
    won = torch.empty(num_samples, num_runs, dtype=torch.float32, device=logits.device)
    best = torch.empty(num_samples, num_runs, dtype=torch.int32, device=logits.device)
    _draw[(num_runs, num_samples)](
        logits, room.peaks, room.highest, won, best, samples, rows.sampling, vocab, num_tiles, columns, room.tile,
        RUN, num_warps=8,
    )  # fmt: skip
    _pick[(num_samples,)](
        room.highest, won, best, chosen, samples, rows.tokens, num_runs, width, triton.next_power_of_2(num_runs),
        num_warps=1,
    )  # fmt: skip
    return chosen
