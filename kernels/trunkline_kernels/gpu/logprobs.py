"""Log-probabilities of chosen tokens, and of the most likely ones, on the device.

All logits are read once, by many programs per row, for each tile's contribution. One program per row then adds up the
contributions. It finds the most likely tokens in the tiles with the highest logits, and reads no other tile again.

Reference: trunkline_worker.runner.sampler.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trunkline_kernels.gpu.sampling_tiles import RUN, tile_size

NO_TOKEN = tl.constexpr(2147483647)


@triton.jit
def _tile_logprobs(
    logits,  # [num_rows, vocab] float32
    chosen,  # [num_rows] int64
    peaks,  # [num_rows, num_tiles] float32 ← the highest logit
    ids,  # [num_rows, num_tiles] int32 ← its token, the lowest of equals
    masses,  # [num_rows, num_tiles] float32 ← sum of exp(x - peak)
    above,  # [num_rows, num_tiles] int32 ← number of tokens more likely than the chosen one
    vocab,
    num_tiles,
    TILE: tl.constexpr,
    RUN: tl.constexpr,  # tiles of a program
):  # fmt: skip
    """Grid: (runs of tiles, num_rows)."""
    index = tl.program_id(1).to(tl.int64)
    row = logits + index * vocab
    value = tl.load(row + tl.maximum(tl.load(chosen + index), 0))
    number = tl.program_id(0) * RUN + tl.arange(0, RUN)
    at = number[:, None] * TILE + tl.arange(0, TILE)[None, :]
    known = at < vocab
    x = tl.load(row + at, mask=known, other=float("-inf"))
    peak = tl.max(x, axis=1)
    anchor = tl.where(peak == float("-inf"), 0.0, peak)
    there = number < num_tiles
    place = index * num_tiles + number
    tl.store(peaks + place, peak, mask=there)
    tl.store(ids + place, number * TILE + tl.argmax(x, axis=1, tie_break_left=True), mask=there)
    tl.store(masses + place, tl.sum(tl.exp(x - anchor[:, None]), axis=1), mask=there)
    tl.store(above + place, tl.sum(((x > value) & known).to(tl.int32), axis=1), mask=there)


@triton.jit(do_not_specialize=["num_top"])
def _row_logprobs(
    logits,  # [num_rows, vocab] float32
    chosen,  # [num_rows] int64
    peaks, ids, masses, above,  # [num_rows, num_tiles], of _tile_logprobs
    logprob,  # [num_rows] float32 ←
    rank,  # [num_rows] int32 ← 1: the most likely
    top_ids,  # [num_rows, num_top] int32 ← most likely first
    top_logprobs,  # [num_rows, num_top] float32 ←
    vocab,
    num_tiles,
    num_top,
    TILE: tl.constexpr,
    PADDED_TILES: tl.constexpr,
):  # fmt: skip
    """Grid: (num_rows)."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * vocab
    number = tl.arange(0, PADDED_TILES)
    there = number < num_tiles
    place = index * num_tiles + number
    peak = tl.load(peaks + place, mask=there, other=float("-inf"))
    token = tl.load(ids + place, mask=there, other=NO_TOKEN)
    mass = tl.load(masses + place, mask=there, other=0.0)
    highest = tl.max(peak)
    anchor = tl.where(highest == float("-inf"), 0.0, highest)
    base = highest + tl.log(tl.sum(mass * tl.exp(peak - anchor)))
    tl.store(logprob + index, tl.load(row + tl.maximum(tl.load(chosen + index), 0)) - base)
    tl.store(rank + index, tl.sum(tl.load(above + place, mask=there, other=0)) + 1)
    # `token` has the most likely remaining token of each tile. After one is reported, the next of its tile replaces it,
    # by descending logit, then by ascending id.
    for at_top in tl.range(0, num_top):
        best = tl.max(peak)
        best_id = tl.min(tl.where(peak == best, token, NO_TOKEN))
        tl.store(top_ids + index * num_top + at_top, best_id)
        tl.store(top_logprobs + index * num_top + at_top, best - base)
        tile = best_id // TILE
        at = tile * TILE + tl.arange(0, TILE)
        known = at < vocab
        x = tl.load(row + at, mask=known, other=float("-inf"))
        left = known & ((x < best) | ((x == best) & (at > best_id)))
        here = tl.max(tl.where(left, x, float("-inf")))
        here_id = tl.min(tl.where(left & (x == here), at, NO_TOKEN))
        peak = tl.where(number == tile, here, peak)
        token = tl.where(number == tile, here_id, token)


def logprobs(logits: Tensor, chosen: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns log-probabilities and ranks of the chosen tokens, and ids and log-probabilities of the `top` most likely.

    logits: [num_rows, vocab] float32, chosen: [num_rows] int64
    → [num_rows] float32, [num_rows] int32 from 1, [num_rows, top] int32, [num_rows, top] float32
    """
    num_rows, vocab = logits.shape

    def room(width: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_rows, width, dtype=dtype, device=logits.device)

    logprob, rank = room(1, torch.float32).view(num_rows), room(1, torch.int32).view(num_rows)
    top_ids, top_logprobs = room(top, torch.int32), room(top, torch.float32)
    if not num_rows:
        return logprob, rank, top_ids, top_logprobs
    tile = tile_size(vocab)
    num_tiles = triton.cdiv(vocab, tile)
    peaks, masses = room(num_tiles, torch.float32), room(num_tiles, torch.float32)
    ids, above = room(num_tiles, torch.int32), room(num_tiles, torch.int32)
    _tile_logprobs[(triton.cdiv(num_tiles, RUN), num_rows)](
        logits, chosen, peaks, ids, masses, above, vocab, num_tiles, tile, RUN, num_warps=8
    )
    _row_logprobs[(num_rows,)](
        logits, chosen, peaks, ids, masses, above, logprob, rank, top_ids, top_logprobs, vocab, num_tiles, top, tile,
        triton.next_power_of_2(num_tiles), num_warps=4,
    )  # fmt: skip
    return logprob, rank, top_ids, top_logprobs
