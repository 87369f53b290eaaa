"""From logits to tokens.

Order: log-probabilities of the untouched distribution; bias, penalties and min_tokens (penalties.py); greedy where the
temperature is 0; otherwise temperature, top_k, top_p over what top_k left, min_p, and a draw.

top_k keeps every token whose logit is at least the k-th largest one, so equal logits are treated equally. top_p keeps
the smallest nucleus: of equal logits at its edge, those of the lowest token ids.

Logits are shifted by the row's highest one before they are divided by the temperature. The highest is then 0 and the
others are negative, so nothing overflows to a value that is compared or drawn: the likeliest token always stays.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import log

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trunkline_worker.batch_rows import Row
from trunkline_worker.logprobs import position_logprobs
from trunkline_worker.penalties import adjust_logits, changes_logits
from trunkline_worker.plan import PositionLogprobs, RowError, Sampling
from trunkline_worker.sampling_key import NOISE_SPREAD, position_key, race_noise

# The nucleus of top_p is looked for among this many likeliest tokens before the whole row is sorted.
NUCLEUS_GUESS = 256
NOT_FINITE = RowError("the model's output is not finite")
NOTHING_LEFT = RowError("min_tokens leaves no token that may be chosen")


@dataclass(frozen=True, slots=True)
class Sampled:
    """Per row."""

    token_ids: list[int | None]
    logprobs: dict[int, PositionLogprobs] = field(default_factory=dict)
    errors: dict[int, RowError] = field(default_factory=dict)

    @classmethod
    def join(cls, parts: "list[Sampled]") -> "Sampled":
        """Of rows that were sampled one by one."""
        return cls(
            [part.token_ids[0] for part in parts],
            {i: part.logprobs[0] for i, part in enumerate(parts) if part.logprobs},
            {i: part.errors[0] for i, part in enumerate(parts) if part.errors},
        )


def is_plain_greedy(row: Row) -> bool:
    """Whether a row's next token is simply the likeliest one, and nothing is to be told about it."""
    return row.sampling.temperature == 0 and row.sampling.logprobs is None and not changes_logits(row)


def sample_isolated(
    logits_of: Callable[[Tensor], Tensor],
    choose: Callable[[Tensor, list[Row]], Sampled],
    hidden: Tensor,
    rows: list[Row],
) -> Sampled:
    """The next token of each row. An exception that one row's parameters raise is that row's error; the other rows get
    their tokens. An exception of the model itself is raised.

    logits_of: hidden states [num_rows, hidden] → logits [num_rows, vocab]; choose: samples from them, and may overwrite
    them
    """
    logits = logits_of(hidden)
    try:
        return choose(logits, rows)
    except Exception:  # whatever it was, it must not cost the other rows their tokens
        parts = []
        for i, row in enumerate(rows):
            logits = logits_of(hidden[i : i + 1])  # again: choose() may have changed the first ones
            try:
                parts.append(choose(logits, [row]))
            except Exception as error:
                parts.append(Sampled([None], errors={0: RowError.of_bug(error)}))
        return Sampled.join(parts)


def sample(logits: Tensor, rows: list[Row], *, row_by_row: bool) -> Sampled:
    """Chooses each row's next token. `logits` [num_rows, vocab] float32 is overwritten.

    `row_by_row` makes a row's bits independent of the others (for --deterministic): reductions over several rows may
    be split among threads in another way than over one.
    """
    if row_by_row and len(rows) > 1:
        return Sampled.join([sample(logits[i : i + 1], [row], row_by_row=False) for i, row in enumerate(rows)])
    best = logits.argmax(dim=-1)
    # argmax lands on a NaN if there is one, so a look at the best logit finds every unusable row.
    errors = dict.fromkeys(_not_finite(logits, best), NOT_FINITE)
    raw = _raw_copy(logits, rows)
    changed = [i for i, row in enumerate(rows) if changes_logits(row) and i not in errors]
    for i in changed:
        adjust_logits(logits[i], rows[i])
    if changed:
        best = logits.argmax(dim=-1)
        errors |= {i: NOTHING_LEFT for i in _not_finite(logits, best) if i not in errors}
    token_ids: list[int | None] = list(best.tolist())
    drawn = [i for i, row in enumerate(rows) if row.sampling.temperature > 0 and i not in errors]
    if drawn:
        highest = logits.gather(1, best[:, None])
        for i, token_id in zip(drawn, _draw(logits, highest, rows, drawn), strict=True):
            token_ids[i] = token_id
    for i in errors:
        token_ids[i] = None
    return Sampled(token_ids, _logprobs(raw, rows, token_ids), errors)


def _not_finite(logits: Tensor, best: Tensor) -> list[int]:
    """Rows whose best logit is not finite."""
    unusable: list[int] = (~logits.gather(1, best[:, None]).isfinite()).nonzero()[:, 0].tolist()
    return unusable


def _raw_copy(logits: Tensor, rows: list[Row]) -> tuple[list[int], Tensor] | None:
    wanting = [i for i, row in enumerate(rows) if row.sampling.logprobs is not None]
    return (wanting, logits[wanting]) if wanting else None


def _logprobs(
    raw: tuple[list[int], Tensor] | None, rows: list[Row], token_ids: list[int | None]
) -> dict[int, PositionLogprobs]:
    if raw is None:
        return {}
    wanting, logits = raw
    chosen = [token_ids[i] or 0 for i in wanting]
    found = position_logprobs(logits, chosen, [rows[i].sampling.logprobs or 0 for i in wanting])
    return {i: entry for i, entry in zip(wanting, found, strict=True) if token_ids[i] is not None}


def _draw(logits: Tensor, highest: Tensor, rows: list[Row], drawn: list[int]) -> list[int]:
    """One token for each of the rows `drawn`.  highest: [num_rows, 1] finite"""
    samplings = [rows[i].sampling for i in drawn]
    temperature = torch.tensor([s.temperature for s in samplings])[:, None]
    scaled = logits[drawn].sub_(highest[drawn]).div_(temperature)  # at most 0, which is the likeliest token's
    # What lies further below the peak than noise can lift is left out: that changes nothing.
    least = torch.tensor([max(-NOISE_SPREAD, log(s.min_p)) if s.min_p else -NOISE_SPREAD for s in samplings])
    kept = scaled >= least[:, None]
    for j, s in enumerate(samplings):
        if 0 < s.top_k < scaled.shape[1] or s.top_p < 1.0:
            kept[j] &= _nucleus(logits[drawn[j]], scaled[j], s)
    row_of, ids = kept.nonzero(as_tuple=True)
    values = scaled[row_of, ids].numpy().astype(np.float64)
    keys = np.array([position_key(rows[i].sampling.seed, rows[i].num_tokens) for i in drawn], np.uint64)
    starts = np.searchsorted(row_of.numpy(), np.arange(len(drawn)))
    scores = values + race_noise(keys[row_of.numpy()], ids.numpy())
    return _argmax_segments(scores, ids.numpy(), starts)


def _argmax_segments(scores: NDArray[np.float64], ids: NDArray[np.int64], starts: NDArray[np.int64]) -> list[int]:
    ends = [*starts[1:], len(scores)]
    return [int(ids[start + int(scores[start:end].argmax())]) for start, end in zip(starts, ends, strict=True)]


def _nucleus(logits: Tensor, scaled: Tensor, s: Sampling) -> Tensor:
    """What top_k and then top_p keep: [vocab] bool, at least one of them true.

    Tokens are ordered by `logits`, which tell more of them apart than `scaled`, (logits - highest) / temperature, does.
    """
    candidates, weights = logits, scaled
    if 0 < s.top_k < len(logits):
        kept = logits >= logits.topk(s.top_k).values[-1]
        if s.top_p >= 1.0:
            return kept
        candidates, weights = logits[kept], scaled[kept]
    weights = weights.exp()
    total = float(weights.sum(dtype=torch.float64))
    size = min(NUCLEUS_GUESS, len(candidates))
    while True:
        largest = candidates.topk(size)
        mass = weights[largest.indices].double().cumsum(0)
        if size == len(candidates) or float(mass[-1]) >= s.top_p * total:
            break
        size = len(candidates)
    count = min(int((mass < s.top_p * total).sum()) + 1, size)  # of tokens: the fewest that reach top_p
    edge = largest.values[count - 1]
    inside = logits > edge
    equal = (logits == edge).nonzero()[:, 0]
    inside[equal[: count - int(inside.sum())]] = True
    return inside
