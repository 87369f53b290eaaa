"""Bias, penalties and masks on the device. References: trunkline_worker.runner.sampler, and token_masks for masks."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trunkline_kernels.gpu.device_rows import (
    FREQUENCY,
    PRESENCE,
    PROMPT_LEN,
    REPETITION,
    SAMPLING_COLUMNS,
    DeviceRows,
)
from trunkline_kernels.token_masks import RowMasks

BLOCK = 1024  # logits of a program
HISTORY_BLOCK = 1024
LARGEST = tl.constexpr(3.4028234e38)


@triton.jit(do_not_specialize=["num_entries"])
def _add_bias(
    logits,  # [num_rows, vocab]
    rows, ids,  # [num_entries] int32
    bias,  # [num_entries] float32; -inf: the token is forbidden
    num_entries,
    vocab,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    known = at < num_entries
    place = (
        logits + tl.load(rows + at, mask=known, other=0).to(tl.int64) * vocab + tl.load(ids + at, mask=known, other=0)
    )
    # Not clamped: at most 100 is added, which is lost in rounding long before a sum could overflow.
    tl.store(place, tl.load(place, mask=known, other=0.0) + tl.load(bias + at, mask=known, other=0.0), mask=known)


@triton.jit
def _count_tokens(
    counts,  # [num_penalised, vocab] int32, zeros ← occurrences in the output, and a mark if it is in the prompt
    penalised,  # [num_penalised, 3] int32: row of the logits, row of the tables, number of tokens
    sampling,  # [num_rows, COLUMNS] int32
    tokens,  # [num_rows, token_width] int32
    token_width,
    vocab,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (num_penalised, blocks of the longest history). The prompt's mark is bit 30, which no count reaches."""
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
    # Finite logits stay finite; -inf (a forbidden token), infinity and NaN stay as they are.
    finite = tl.abs(x) <= LARGEST
    changed = tl.where(x > 0, x / factor, x * factor)
    changed = tl.where(finite, tl.minimum(tl.maximum(changed, -LARGEST), LARGEST), changed)
    x = tl.where(count > 0, changed, x)
    generated = count & ((1 << 30) - 1)
    frequency = tl.load(columns + FREQUENCY).to(tl.float32, bitcast=True)
    presence = tl.load(columns + PRESENCE).to(tl.float32, bitcast=True)
    x = tl.where(generated > 0, x - (frequency * generated.to(tl.float32) + presence), x)
    tl.store(place, x, mask=inside & (count > 0))


@triton.jit
def _exclude(
    logits,  # [.., vocab]
    rows,  # [num_masks] int64
    words,  # [num_masks, num_words] int32
    num_words,
    vocab,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (num_masks, blocks of the vocabulary)."""
    index = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(words + index * num_words + at // 32, mask=at < num_words * 32, other=0)
    place = logits + tl.load(rows + index) * vocab + at
    x = tl.load(place, mask=at < vocab, other=0.0)
    # Infinity and NaN stay: they show that a row is broken.
    excluded = ((word >> (at % 32)) & 1 == 0) & (x < float("inf"))
    tl.store(place, float("-inf"), mask=excluded & (at < vocab))


def add_bias(logits: Tensor, rows: Tensor, ids: Tensor, bias: Tensor) -> None:
    """Adds biases in place: logits[rows, ids] += bias.

    logits: [num_rows, vocab]; rows, ids: [num_entries] int32, no pair twice; bias: [num_entries] float32
    """
    if len(rows):
        _add_bias[(triton.cdiv(len(rows), 256),)](logits, rows, ids, bias, len(rows), logits.shape[1], 256)


def penalise(logits: Tensor, penalised: Tensor, rows: DeviceRows, longest: int) -> None:
    """Applies repetition, frequency and presence penalties in place.

    logits: [num_samples, vocab] float32
    penalised: [num_penalised, 3] int32, (row of logits, row of `rows`, number of tokens); longest: most tokens of one
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


def exclude(logits: Tensor, masks: RowMasks) -> None:
    """Sets the logits of tokens that masks exclude to -inf, in place.  logits: [num_rows, vocab] float32"""
    num_masks, num_words = masks.words.shape
    vocab = logits.shape[1]
    _exclude[(num_masks, triton.cdiv(vocab, BLOCK))](logits, masks.rows, masks.words, num_words, vocab, BLOCK)
