"""From logits to tokens on the device: bias, penalties, top-k, top-p, min-p, a draw, log-probabilities.

Nothing visits the host. A draw is the Gumbel-max trick with noise that is a function of (key of seed and position,
token id) alone, so there is no generator state. top_k and top_p become a threshold on the logits, found by bisection
over the bits of the numbers instead of a sort: everything at or above it stays, equal logits are treated equally.

Twin: trunkline_worker.sampler and trunkline_worker.sampling_key, which say what the parameters mean.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # logits that a program looks at at once
HISTORY_BLOCK = 1024
# No noise lifts a token over another that is likelier by more than this: see sampling_key.NOISE_SPREAD.
NOISE_SPREAD = tl.constexpr(26.1)
LARGEST = tl.constexpr(3.4028234e38)


@triton.jit
def _order(x):
    """uint32 that order as the float32 do; -0.0 lies just below 0.0."""
    bits = x.to(tl.int32, bitcast=True)
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
    # log(1 - v) by its series where 1 - v would round to 1.
    exponential = tl.where(uniform < 1e-4, uniform + 0.5 * uniform * uniform, -tl.log(1.0 - uniform))
    return -tl.log(exponential)


@triton.jit
def _highest_cut(
    row,  # logits of the row
    scale,  # 1 / temperature
    peak,  # highest scaled logit
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
        weights = tl.zeros([16], tl.float32)
        for start in tl.range(0, vocab, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(row + at, mask=at < vocab, other=float("-inf")) * scale
            order = _order(x)
            counts = (at < vocab) & (order >= floor)
            weight = tl.where(counts, tl.exp(x - peak) if MASS else 1.0, 0.0)
            weights += tl.sum(tl.where(order[None, :] >= cuts[:, None], weight[None, :], 0.0), axis=1)
        chosen = tl.max(tl.where(weights >= target, tl.arange(0, 16), 0))
        cut += chosen.to(tl.uint32) << (28 - 4 * step)
    return cut


@triton.jit
def _sample(
    logits,  # [num_rows, vocab] float32
    tokens,  # [num_rows] int64 ← -1 where the logits are not finite
    temperature,  # [num_rows] float32; 0: greedy
    top_k,  # [num_rows] int32; 0: all
    top_p, min_p,  # [num_rows] float32
    keys,  # [num_rows, 2] int32: low and high half of the position's key
    vocab,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * vocab
    highest = tl.full([], float("-inf"), tl.float32)
    best = tl.full([], 0, tl.int32)
    broken = tl.full([], 0, tl.int32)
    for start in tl.range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(row + at, mask=at < vocab, other=float("-inf"))
        broken += tl.sum((x != x).to(tl.int32))
        here = tl.max(x)
        better = here > highest
        best = tl.where(better, start + tl.argmax(x, axis=0, tie_break_left=True), best)
        highest = tl.where(better, here, highest)
    finite = (broken == 0) & (tl.abs(highest) <= LARGEST)
    heat = tl.load(temperature + index)
    if finite & (heat > 0):
        scale = 1.0 / heat
        peak = highest * scale
        k = tl.load(top_k + index)
        p = tl.load(top_p + index)
        least = peak + tl.maximum(-NOISE_SPREAD, tl.log(tl.maximum(tl.load(min_p + index), 1e-30)))
        cut = tl.full([], 0, tl.uint32)
        if (k > 0) & (k < vocab):
            cut = _highest_cut(row, scale, peak, cut, k.to(tl.float32), False, vocab, BLOCK)
        if p < 1.0:
            total = tl.full([], 0.0, tl.float32)
            for start in tl.range(0, vocab, BLOCK):
                at = start + tl.arange(0, BLOCK)
                x = tl.load(row + at, mask=at < vocab, other=float("-inf")) * scale
                total += tl.sum(tl.where((at < vocab) & (_order(x) >= cut), tl.exp(x - peak), 0.0))
            # The likeliest token always stays.
            nucleus = _highest_cut(row, scale, peak, cut, tl.maximum(p * total, 1e-30), True, vocab, BLOCK)
            cut = tl.maximum(cut, nucleus)
        won = tl.full([], float("-inf"), tl.float32)
        low = tl.load(keys + index * 2).to(tl.uint32, bitcast=True)
        high = tl.load(keys + index * 2 + 1).to(tl.uint32, bitcast=True)
        for start in tl.range(0, vocab, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(row + at, mask=at < vocab, other=float("-inf")) * scale
            stays = (at < vocab) & (x >= least) & (_order(x) >= cut)
            score = tl.where(stays, x + _noise(low, high, at), float("-inf"))
            here = tl.max(score)
            better = here > won
            best = tl.where(better, start + tl.argmax(score, axis=0, tie_break_left=True), best)
            won = tl.where(better, here, won)
    tl.store(tokens + index, tl.where(finite, best, -1).to(tl.int64))


@triton.jit
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
    tl.store(place, tl.load(place, mask=known, other=0.0) + tl.load(bias + at, mask=known, other=0.0), mask=known)


@triton.jit
def _count_tokens(
    counts,  # [num_rows, vocab] int32, zeros ← a token's appearances in the output, and SEEN if it is in the prompt
    history,  # [num_rows, max_tokens] int32
    lens,  # [num_rows] int32
    prompt_lens,  # [num_rows] int32
    history_stride,
    vocab,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (num_rows, blocks of history). The prompt's mark is bit 30: no output is as long."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = at < tl.load(lens + row)
    token = tl.load(history + row * history_stride + at, mask=known, other=0)
    place = counts + row * vocab + token
    is_prompt = at < tl.load(prompt_lens + row)
    tl.atomic_or(place, 1 << 30, mask=known & is_prompt)
    tl.atomic_add(place, 1, mask=known & (at >= tl.load(prompt_lens + row)))


@triton.jit
def _penalise(
    logits,  # [.., vocab]
    counts,  # [num_rows, vocab]
    rows,  # [num_rows] int32: of the logits
    repetition, frequency, presence,  # [num_rows] float32
    vocab,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (num_rows, blocks of the vocabulary)."""
    index = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocab
    count = tl.load(counts + index * vocab + at, mask=inside, other=0)
    place = logits + tl.load(rows + index).to(tl.int64) * vocab + at
    x = tl.load(place, mask=inside, other=0.0)
    factor = tl.load(repetition + index)
    x = tl.where(count > 0, tl.where(x > 0, x / factor, x * factor), x)
    generated = count & ((1 << 30) - 1)
    penalty = tl.load(frequency + index) * generated.to(tl.float32) + tl.load(presence + index)
    x = tl.where(generated > 0, x - penalty, x)
    tl.store(place, x, mask=inside & (count > 0))


@triton.jit
def _logprobs(
    logits,  # [num_rows, vocab] float32
    chosen,  # [num_rows] int64
    logprob,  # [num_rows] float32 ←
    rank,  # [num_rows] int32 ← 1: the likeliest
    top_ids,  # [num_rows, TOP] int32 ← likeliest first
    top_logprobs,  # [num_rows, TOP] float32 ←
    vocab,
    TOP: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * vocab
    value = tl.load(row + tl.maximum(tl.load(chosen + index), 0))
    peak = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    above = tl.full([], 0, tl.int32)
    for start in tl.range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
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
    for place in tl.range(0, TOP):
        best = tl.full([], float("-inf"), tl.float32)
        best_id = tl.full([], 2147483647, tl.int32)
        for start in tl.range(0, vocab, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(row + at, mask=at < vocab, other=float("-inf"))
            left = (at < vocab) & ((x < last) | ((x == last) & (at > last_id)))
            here = tl.max(tl.where(left, x, float("-inf")))
            here_id = tl.min(tl.where(left & (x == here), at, 2147483647))
            better = (here > best) | ((here == best) & (here_id < best_id))
            best_id = tl.where(better, here_id, best_id)
            best = tl.where(better, here, best)
        tl.store(top_ids + index * TOP + place, best_id)
        tl.store(top_logprobs + index * TOP + place, best - base)
        last = best
        last_id = best_id


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """What the rows of a step's logits are sampled with; all on the device, one entry per row."""

    temperature: Tensor  # float32; 0: greedy
    top_k: Tensor  # int32; 0: all
    top_p: Tensor  # float32
    min_p: Tensor  # float32
    keys: Tensor  # [num_rows, 2] int32: low and high half of sampling_key.position_key


@dataclass(frozen=True, slots=True)
class PenaltyRows:
    """The rows of a step's logits that are penalised; all on the device."""

    rows: Tensor  # [num_rows] int32: of the logits
    history: Tensor  # [num_rows, max_tokens] int32: prompt and output
    lens: Tensor  # [num_rows] int32
    prompt_lens: Tensor  # [num_rows] int32
    repetition: Tensor  # [num_rows] float32
    frequency: Tensor  # [num_rows] float32
    presence: Tensor  # [num_rows] float32


def sample(logits: Tensor, rows: SamplingRows) -> Tensor:
    """The next token of each row.  logits: [num_rows, vocab] float32 → [num_rows] int64; -1: they are not finite"""
    num_rows, vocab = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        _sample[(num_rows,)](
            logits, tokens, rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.keys, vocab,
            min(BLOCK, triton.next_power_of_2(vocab)), num_warps=8,
        )  # fmt: skip
    return tokens


def add_bias(logits: Tensor, rows: Tensor, ids: Tensor, bias: Tensor) -> None:
    """logits[rows, ids] += bias, in place; no pair twice.  rows, ids: [num_entries] int32, bias: float32"""
    if len(rows):
        _add_bias[(triton.cdiv(len(rows), 256),)](logits, rows, ids, bias, len(rows), logits.shape[1], 256)


def penalise(logits: Tensor, penalties: PenaltyRows) -> None:
    """Repetition, frequency and presence penalties, in place.  logits: [num_rows, vocab] float32"""
    vocab = logits.shape[1]
    num_rows, max_tokens = penalties.history.shape
    if not num_rows:
        return
    counts = torch.zeros(num_rows, vocab, dtype=torch.int32, device=logits.device)
    _count_tokens[(num_rows, triton.cdiv(max_tokens, HISTORY_BLOCK))](
        counts, penalties.history, penalties.lens, penalties.prompt_lens, penalties.history.stride(0), vocab,
        HISTORY_BLOCK,
    )  # fmt: skip
    _penalise[(num_rows, triton.cdiv(vocab, BLOCK))](
        logits, counts, penalties.rows, penalties.repetition, penalties.frequency, penalties.presence, vocab, BLOCK
    )


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
            min(BLOCK, triton.next_power_of_2(vocab)), num_warps=8,
        )  # fmt: skip
    return logprob, rank, top_ids, top_logprobs
