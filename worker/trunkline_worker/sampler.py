"""From logits to tokens.

Order: log-probabilities of the untouched distribution; bias, min_tokens and penalties (penalties.py); greedy where the
temperature is 0; otherwise temperature, top_k, top_p over what top_k left, min_p, and a draw.

top_k and top_p become a threshold on the logits, and everything at or above it stays, so equal logits are treated
equally and no order among them matters.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trunkline_worker.batch_rows import Row
from trunkline_worker.logprobs import position_logprobs
from trunkline_worker.penalties import adjust_logits, changes_logits
from trunkline_worker.plan import PositionLogprobs
from trunkline_worker.sampling_key import NOISE_SPREAD, position_key, race_noise

# The nucleus of top_p is looked for among this many likeliest tokens before the whole row is sorted.
NUCLEUS_GUESS = 256
NOT_FINITE = "the model's output is not finite"


@dataclass(frozen=True, slots=True)
class Sampled:
    """Per row."""

    token_ids: list[int | None]
    logprobs: dict[int, PositionLogprobs] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)


def is_plain_greedy(row: Row) -> bool:
    """Whether a row's next token is simply the likeliest one, and nothing is to be told about it."""
    return row.sampling.temperature == 0 and row.sampling.logprobs is None and not changes_logits(row)


def sample(logits: Tensor, rows: list[Row], *, row_by_row: bool) -> Sampled:
    """Chooses each row's next token. `logits` [num_rows, vocab] float32 is overwritten.

    `row_by_row` makes a row's bits independent of the others (for --deterministic): reductions over several rows may
    be split among threads in another way than over one.
    """
    if row_by_row and len(rows) > 1:
        parts = [sample(logits[i : i + 1], [row], row_by_row=False) for i, row in enumerate(rows)]
        return Sampled(
            [part.token_ids[0] for part in parts],
            {i: part.logprobs[0] for i, part in enumerate(parts) if part.logprobs},
            {i: part.errors[0] for i, part in enumerate(parts) if part.errors},
        )
    best = logits.argmax(dim=-1)
    raw = _raw_copy(logits, rows)
    changed = [i for i, row in enumerate(rows) if changes_logits(row)]
    for i in changed:
        adjust_logits(logits[i], rows[i])
    if changed:
        best = logits.argmax(dim=-1)
    highest = logits.gather(1, best[:, None])[:, 0]
    token_ids: list[int | None] = list(best.tolist())
    drawn = [i for i, row in enumerate(rows) if row.sampling.temperature > 0]
    # argmax lands on a NaN if there is one, so a look at the best logit finds every unusable row.
    errors = {i: NOT_FINITE for i in (~highest.isfinite()).nonzero()[:, 0].tolist()}
    drawn = [i for i in drawn if i not in errors]
    if drawn:
        for i, token_id in zip(drawn, _draw(logits, highest, rows, drawn), strict=True):
            token_ids[i] = token_id
    for i in errors:
        token_ids[i] = None
    return Sampled(token_ids, _logprobs(raw, rows, token_ids), errors)


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
    """One token for each of the rows `drawn`."""
    samplings = [rows[i].sampling for i in drawn]
    temperature = torch.tensor([s.temperature for s in samplings])[:, None]
    scaled = logits[drawn] / temperature
    peak = highest[drawn][:, None] / temperature
    # What lies further below the peak than noise can lift is left out: that changes nothing.
    threshold = peak - NOISE_SPREAD
    min_p = torch.tensor([s.min_p for s in samplings])[:, None]
    threshold = torch.maximum(threshold, peak + min_p.log())
    for j, s in enumerate(samplings):
        if 0 < s.top_k < scaled.shape[1] or s.top_p < 1.0:
            cut = _cut(scaled[j], s.top_k, s.top_p)
            threshold[j] = torch.maximum(threshold[j], cut)
    row_of, ids = (scaled >= threshold).nonzero(as_tuple=True)
    values = scaled[row_of, ids].numpy().astype(np.float64)
    keys = np.array([position_key(rows[i].sampling.seed, rows[i].num_tokens) for i in drawn], np.uint64)
    starts = np.searchsorted(row_of.numpy(), np.arange(len(drawn)))
    scores = values + race_noise(keys[row_of.numpy()], ids.numpy())
    return _argmax_segments(scores, ids.numpy(), starts)


def _argmax_segments(scores: NDArray[np.float64], ids: NDArray[np.int64], starts: NDArray[np.int64]) -> list[int]:
    ends = [*starts[1:], len(scores)]
    return [int(ids[start + int(scores[start:end].argmax())]) for start, end in zip(starts, ends, strict=True)]


def _cut(scaled: Tensor, top_k: int, top_p: float) -> Tensor:
    """The smallest logit that top_k and then top_p keep. scaled: [vocab] → [1]"""
    vocab = len(scaled)
    top_k = min(top_k, vocab) if top_k > 0 else vocab
    size = min(top_k, NUCLEUS_GUESS) if top_p < 1.0 else top_k
    while True:
        values = scaled.topk(size).values
        if top_p >= 1.0:
            return values[-1:]
        # Probabilities are of what top_k keeps: all of `values` if that is top_k, else approximately the whole row.
        total = (values if size == top_k else scaled if top_k == vocab else scaled.topk(top_k).values).logsumexp(0)
        mass = (values - total).exp().cumsum(0)
        before = mass - (values - total).exp()  # mass of the likelier ones: the first token always stays
        if size == top_k or mass[-1] >= top_p:
            kept = int((before < top_p).sum())
            return values[max(kept, 1) - 1 : max(kept, 1)]
        size = top_k
