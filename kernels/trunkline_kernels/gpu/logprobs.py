"""Log-probabilities of chosen tokens, and of the likeliest ones, on the device.

Twin: trunkline_worker.logprobs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDE = 4096  # logits that a program looks at at once: few long loads, because nothing hides a load's latency


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
