"""From logits to tokens on the device: bias, penalties, top-k, top-p, min-p, a draw, log-probabilities.

Nothing visits the host: parameters and history lie in the rows that stay on the device. A draw is the Gumbel-max trick
with noise that is a function of (key of seed and position, token id) alone, so there is no generator state. top_k and
top_p become a threshold on the logits, found by bisection over the bits of the numbers instead of a sort. At the edge
of top_k equal logits all stay; at that of top_p those of the lowest token ids do, as many as reach p.

Logits are shifted by the row's highest one before they are scaled. The highest is then 0 and the others are negative,
so nothing overflows to a value that is compared or drawn: the likeliest token always stays.

Twin: trunkline_worker.sampler and trunkline_worker.sampling_key, which say what the parameters mean.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trunkline_kernels.gpu.device_rows import (
    FREQUENCY,
    MIN_P,
    PRESENCE,
    PROMPT_LEN,
    REPETITION,
    SAMPLING_COLUMNS,
    SEED_HIGH,
    SEED_LOW,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    DeviceRows,
)

BLOCK = 1024  # logits that a program compares with sixteen cuts at once
WIDE = 4096  # logits that it looks at at once otherwise: few long loads, because nothing hides a load's latency
HISTORY_BLOCK = 1024
# No noise lifts a token over another that is likelier by more than this: see sampling_key.NOISE_SPREAD.
NOISE_SPREAD = tl.constexpr(26.1)
LARGEST = tl.constexpr(3.4028234e38)


@triton.jit
def _order(x):
    """uint32 that order as the float32 do."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    return tl.where(bits < 0, ~bits, bits | -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def _mixed(x):
    """MurmurHash3's 32-bit finaliser."""
    x ^= x >> 16
    x *= 0x85EBCA6B
    x ^= x >> 13
    x *= 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _noise(low, high, token):
    """Gumbel noise of tokens, float32.  low, high: halves of the position's key, uint32"""
    x = _mixed(token.to(tl.uint32) * 0x9E3779B1 + low)
    x = _mixed(x ^ high)
    # At most 1 - 2 ** -24: the logarithm of nothing is no number.
    uniform = tl.minimum((x.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    # log(1 - v) by its series where 1 - v would round v's lower bits away.
    series = uniform * (1.0 + uniform * (0.5 + uniform * (0.33333334 + uniform * 0.25)))
    exponential = tl.where(uniform < 1e-2, series, -tl.log(1.0 - uniform))
    return -tl.log(exponential)


@triton.jit
def _highest_cut(
    row,  # logits of the row
    scale,  # 1 / temperature
    highest,  # of the logits
    floor,  # uint32: what orders below does not count
    target,  # float32
    MASS: tl.constexpr,  # weights are probabilities relative to the peak's, else ones
    vocab,
    BLOCK: tl.constexpr,
):
    """The highest cut such that the weights of all that order at or above it come to the target; 0 if there is none.

    Four bits of the cut at a time, from the highest.
    """
    cut = tl.full([], 0, tl.uint32)
    digit = tl.arange(0, 16).to(tl.uint32)
    for step in tl.static_range(8):
        cuts = cut + (digit << (28 - 4 * step))
        # Summed up over the row's logits only once they have all been looked at.
        sums = tl.zeros([16, BLOCK], tl.float32)
        for start in tl.range(0, vocab, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(row + at, mask=at < vocab, other=float("-inf"))
            order = _order(x)
            counts = (at < vocab) & (order >= floor)
            weight = tl.where(counts, tl.exp((x - highest) * scale) if MASS else 1.0, 0.0)
            sums += tl.where(order[None, :] >= cuts[:, None], weight[None, :], 0.0)
        weights = tl.sum(sums, axis=1)
        chosen = tl.max(tl.where(weights >= target, tl.arange(0, 16), 0))
        cut += chosen.to(tl.uint32) << (28 - 4 * step)
    return cut


@triton.jit
def _position_key(low, high, position):
    """Key of one position, halves of 64 bits: MurmurHash3's finaliser over seed and position."""
    seed = (high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | low.to(tl.uint32, bitcast=True).to(tl.uint64)
    x = seed + (position + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 33)) * 0xFF51AFD7ED558CCD
    x = (x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53
    x = x ^ (x >> 33)
    return x.to(tl.uint32), (x >> 32).to(tl.uint32)


@triton.jit
def _sample(
    logits,  # [num_samples, vocab] float32
    chosen,  # [num_samples] int64 ← -1 where the logits are not finite
    samples,  # [num_samples, 2] int32: row, position of the new token
    sampling,  # [num_rows, COLUMNS] int32: see device_rows
    tokens,  # [num_rows, token_width] int32 ← at the position; 0 where the logits are not finite
    vocab,
    token_width,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """One program per sample."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * vocab
    highest = tl.full([], float("-inf"), tl.float32)
    best = tl.full([], 0, tl.int32)
    broken = tl.full([], 0, tl.int32)
    for start in tl.range(0, vocab, WIDE):
        at = start + tl.arange(0, WIDE)
        x = tl.load(row + at, mask=at < vocab, other=float("-inf"))
        broken += tl.sum((x != x).to(tl.int32))
        here = tl.max(x)
        better = here > highest
        best = tl.where(better, start + tl.argmax(x, axis=0, tie_break_left=True), best)
        highest = tl.where(better, here, highest)
    finite = (broken == 0) & (tl.abs(highest) <= LARGEST)
    table_row = tl.load(samples + index * 2).to(tl.int64)
    position = tl.load(samples + index * 2 + 1)
    columns = sampling + table_row * COLUMNS
    heat = tl.load(columns + TEMPERATURE).to(tl.float32, bitcast=True)
    if finite & (heat > 0):
        scale = 1.0 / heat
        k = tl.load(columns + TOP_K)
        p = tl.load(columns + TOP_P).to(tl.float32, bitcast=True)
        share = tl.load(columns + MIN_P).to(tl.float32, bitcast=True)
        least = tl.maximum(-NOISE_SPREAD, tl.log(tl.maximum(share, 1e-30)))
        cut = tl.full([], 0, tl.uint32)
        equals = tl.full([], 2147483647, tl.int32)  # tokens that stay of those exactly at the cut
        if (k > 0) & (k < vocab):
            cut = _highest_cut(row, scale, highest, cut, k.to(tl.float32), False, vocab, BLOCK)
        if p < 1.0:
            total = tl.full([], 0.0, tl.float32)
            for start in tl.range(0, vocab, WIDE):
                at = start + tl.arange(0, WIDE)
                x = tl.load(row + at, mask=at < vocab, other=float("-inf"))
                total += tl.sum(tl.where((at < vocab) & (_order(x) >= cut), tl.exp((x - highest) * scale), 0.0))
            # The likeliest token always stays.
            target = tl.maximum(p * total, 1e-30)
            nucleus = _highest_cut(row, scale, highest, cut, target, True, vocab, BLOCK)
            if (nucleus >= cut) & (nucleus > 0):
                cut = nucleus
                above = tl.full([], 0.0, tl.float32)
                weight = tl.full([], 0.0, tl.float32)  # of a token at the cut
                for start in tl.range(0, vocab, WIDE):
                    at = start + tl.arange(0, WIDE)
                    x = tl.load(row + at, mask=at < vocab, other=float("-inf"))
                    mass = tl.exp((x - highest) * scale)
                    above += tl.sum(tl.where((at < vocab) & (_order(x) > cut), mass, 0.0))
                    weight = tl.maximum(weight, tl.max(tl.where((at < vocab) & (_order(x) == cut), mass, 0.0)))
                if weight > 0:  # else the cut is no token's logit
                    equals = tl.minimum(tl.maximum(tl.ceil((target - above) / weight), 1.0), 2.0e9).to(tl.int32)
        passed = tl.full([], 0, tl.int32)  # tokens at the cut, so far
        won = tl.full([], float("-inf"), tl.float32)
        low, high = _position_key(tl.load(columns + SEED_LOW), tl.load(columns + SEED_HIGH), position)
        for start in tl.range(0, vocab, WIDE):
            at = start + tl.arange(0, WIDE)
            logit = tl.load(row + at, mask=at < vocab, other=float("-inf"))
            x = (logit - highest) * scale
            order = _order(logit)
            at_cut = ((at < vocab) & (order == cut)).to(tl.int32)
            kept = (order > cut) | ((at_cut > 0) & (passed + tl.cumsum(at_cut, axis=0) <= equals))
            passed += tl.sum(at_cut)
            stays = (at < vocab) & (x >= least) & kept
            score = tl.where(stays, x + _noise(low, high, at), float("-inf"))
            here = tl.max(score)
            better = here > won
            best = tl.where(better, start + tl.argmax(score, axis=0, tie_break_left=True), best)
            won = tl.where(better, here, won)
    tl.store(chosen + index, tl.where(finite, best, -1).to(tl.int64))
    # Something must stand there: the step after this one may be under way before anybody hears of the failure.
    tl.store(tokens + table_row * token_width + position, tl.where(finite, best, 0), mask=position < token_width)


@triton.jit(do_not_specialize=["num_entries"])
def _add_bias(
    logits,  # [num_rows, vocab]
    rows, ids,  # [num_entries] int32
    bias,  # [num_entries] float32; -inf: the token is out
    num_entries,
    vocab,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known = at < num_entries
    place = (
        logits + tl.load(rows + at, mask=known, other=0).to(tl.int64) * vocab + tl.load(ids + at, mask=known, other=0)
    )
    # Not clamped: at most 100 is added, which rounds away long before a sum could overflow.
    tl.store(place, tl.load(place, mask=known, other=0.0) + tl.load(bias + at, mask=known, other=0.0), mask=known)


@triton.jit
def _count_tokens(
    counts,  # [num_penalised, vocab] int32, zeros ← appearances in the output, and a mark if it is in the prompt
    penalised,  # [num_penalised, 3] int32: row of the logits, row, number of tokens
    sampling,  # [num_rows, COLUMNS] int32
    tokens,  # [num_rows, token_width] int32
    token_width,
    vocab,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (num_penalised, blocks of the longest history). The prompt's mark is bit 30: no output is as long."""
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(penalised + index * 3 + 1).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = at < tl.load(penalised + index * 3 + 2)
    prompt_len = tl.load(sampling + row * COLUMNS + PROMPT_LEN)
    token = tl.load(tokens + row * token_width + at, mask=known, other=0)
    place = counts + index * vocab + token
    tl.atomic_or(place, 1 << 30, mask=known & (at < prompt_len))
    tl.atomic_add(place, 1, mask=known & (at >= prompt_len))


@triton.jit
def _penalise(
    logits,  # [.., vocab]
    counts,  # [num_penalised, vocab]
    penalised,  # [num_penalised, 3] int32
    sampling,  # [num_rows, COLUMNS] int32
    vocab,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (num_penalised, blocks of the vocabulary)."""
    index = tl.program_id(0).to(tl.int64)
    columns = sampling + tl.load(penalised + index * 3 + 1).to(tl.int64) * COLUMNS
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocab
    count = tl.load(counts + index * vocab + at, mask=inside, other=0)
    place = logits + tl.load(penalised + index * 3).to(tl.int64) * vocab + at
    x = tl.load(place, mask=inside, other=0.0)
    factor = tl.load(columns + REPETITION).to(tl.float32, bitcast=True)
    # What was finite stays so; a token that is out stays out, and what is broken is still seen to be.
    finite = tl.abs(x) <= LARGEST
    changed = tl.where(x > 0, x / factor, x * factor)
    changed = tl.where(finite, tl.minimum(tl.maximum(changed, -LARGEST), LARGEST), changed)
    x = tl.where(count > 0, changed, x)
    generated = count & ((1 << 30) - 1)
    frequency = tl.load(columns + FREQUENCY).to(tl.float32, bitcast=True)
    presence = tl.load(columns + PRESENCE).to(tl.float32, bitcast=True)
    x = tl.where(generated > 0, x - (frequency * generated.to(tl.float32) + presence), x)
    tl.store(place, x, mask=inside & (count > 0))


@triton.jit(do_not_specialize=["num_top"])
def _logprobs(
    logits,  # [num_rows, vocab] float32
    chosen,  # [num_rows] int64
    logprob,  # [num_rows] float32 ←
    rank,  # [num_rows] int32 ← 1: the likeliest
    top_ids,  # [num_rows, num_top] int32 ← likeliest first
    top_logprobs,  # [num_rows, num_top] float32 ←
    vocab,
    num_top,
    WIDE: tl.constexpr,
):  # fmt: skip
    """One program per row."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * vocab
    value = tl.load(row + tl.maximum(tl.load(chosen + index), 0))
    peak = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    above = tl.full([], 0, tl.int32)
    for start in tl.range(0, vocab, WIDE):
        at = start + tl.arange(0, WIDE)
        x = tl.load(row + at, mask=at < vocab, other=float("-inf"))
        raised = tl.maximum(peak, tl.max(x))
        anchor = tl.where(raised == float("-inf"), 0.0, raised)
        total = total * tl.exp(peak - anchor) + tl.sum(tl.exp(x - anchor))
        above += tl.sum(((x > value) & (at < vocab)).to(tl.int32))
        peak = raised
    base = peak + tl.log(total)
    tl.store(logprob + index, value - base)
    tl.store(rank + index, above + 1)
    # Each of the likeliest is what comes next after the one before, in the order of (logit falling, id rising).
    last = tl.full([], float("inf"), tl.float32)
    last_id = tl.full([], -1, tl.int32)
    for place in tl.range(0, num_top):
        best = tl.full([], float("-inf"), tl.float32)
        best_id = tl.full([], 2147483647, tl.int32)
        for start in tl.range(0, vocab, WIDE):
            at = start + tl.arange(0, WIDE)
            x = tl.load(row + at, mask=at < vocab, other=float("-inf"))
            left = (at < vocab) & ((x < last) | ((x == last) & (at > last_id)))
            here = tl.max(tl.where(left, x, float("-inf")))
            here_id = tl.min(tl.where(left & (x == here), at, 2147483647))
            better = (here > best) | ((here == best) & (here_id < best_id))
            best_id = tl.where(better, here_id, best_id)
            best = tl.where(better, here, best)
        tl.store(top_ids + index * num_top + place, best_id)
        tl.store(top_logprobs + index * num_top + place, best - base)
        last = best
        last_id = best_id


def sample(logits: Tensor, samples: Tensor, rows: DeviceRows) -> Tensor:
    """The next token of each sample, which is then in its row too.

    logits: [num_samples, vocab] float32; samples: [num_samples, 2] int32, (row, position of the new token)
    → [num_samples] int64; -1: the logits are not finite
    """
    num_samples, vocab = logits.shape
    chosen = torch.empty(num_samples, dtype=torch.int64, device=logits.device)
    if num_samples:
        _sample[(num_samples,)](
            logits, chosen, samples, rows.sampling, rows.tokens, vocab, rows.tokens.shape[1], SAMPLING_COLUMNS.value,
            min(BLOCK, triton.next_power_of_2(vocab)), min(WIDE, triton.next_power_of_2(vocab)), num_warps=8,
        )  # fmt: skip
    return chosen


def add_bias(logits: Tensor, rows: Tensor, ids: Tensor, bias: Tensor) -> None:
    """logits[rows, ids] += bias, in place; no pair twice.  rows, ids: [num_entries] int32, bias: float32"""
    if len(rows):
        _add_bias[(triton.cdiv(len(rows), 256),)](logits, rows, ids, bias, len(rows), logits.shape[1], 256)


def penalise(logits: Tensor, penalised: Tensor, rows: DeviceRows, longest: int) -> None:
    """Repetition, frequency and presence penalties, in place.

    logits: [num_samples, vocab] float32; penalised: [num_penalised, 3] int32, (row of logits, row, number of tokens)
    longest: the most tokens of one of them
    """
    vocab, count = logits.shape[1], len(penalised)
    if not count:
        return
    counts = torch.zeros(count, vocab, dtype=torch.int32, device=logits.device)
    columns = SAMPLING_COLUMNS.value
    _count_tokens[(count, triton.cdiv(longest, HISTORY_BLOCK))](
        counts, penalised, rows.sampling, rows.tokens, rows.tokens.shape[1], vocab, columns, HISTORY_BLOCK
    )
    _penalise[(count, triton.cdiv(vocab, BLOCK))](logits, counts, penalised, rows.sampling, vocab, columns, BLOCK)


def logprobs(logits: Tensor, chosen: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probabilities of the chosen tokens, their ranks, and the likeliest tokens with theirs.

    logits: [num_rows, vocab] float32, chosen: [num_rows] int64
    → [num_rows] float32, [num_rows] int32, [num_rows, top] int32, [num_rows, top] float32
    """
    num_rows, vocab = logits.shape
    logprob = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    rank = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    top_ids = torch.empty(num_rows, top, dtype=torch.int32, device=logits.device)
    top_logprobs = torch.empty(num_rows, top, dtype=torch.float32, device=logits.device)
    if num_rows:
        _logprobs[(num_rows,)](
            logits, chosen, logprob, rank, top_ids, top_logprobs, vocab, top,
            min(WIDE, triton.next_power_of_2(vocab)), num_warps=8,
        )  # fmt: skip
    return logprob, rank, top_ids, top_logprobs
