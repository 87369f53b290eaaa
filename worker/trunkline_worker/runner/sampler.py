"""Chooses tokens from logits.

Order: log-probabilities of the unchanged distribution; bias, penalties and min_tokens (penalties.py); the most likely
token if the temperature is 0; otherwise temperature, top_k, top_p and min_p (candidates.py), and a draw.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from trunkline_worker.runner.batch_rows import Row
from trunkline_worker.runner.candidates import is_narrowed, likely, narrowed
from trunkline_worker.runner.logprobs import position_logprobs
from trunkline_worker.runner.penalties import adjust_logits, changes_logits
from trunkline_worker.step.plan import PositionLogprobs, RowError
from trunkline_worker.step.sampling_key import position_key, race_noise

NOT_FINITE = RowError("the model's output is not finite")
NOTHING_LEFT = RowError("min_tokens leaves no token that may be chosen")


@dataclass(frozen=True, slots=True)
class Sampled:
    """The results of sampling. Dictionaries are by index of the row."""

    token_ids: list[int | None]  # by row; None: see errors
    logprobs: dict[int, PositionLogprobs] = field(default_factory=dict)
    errors: dict[int, RowError] = field(default_factory=dict)

    @classmethod
    def join(cls, parts: "list[Sampled]") -> "Sampled":
        """Joins the results of rows that were sampled one by one."""
        return cls(
            [part.token_ids[0] for part in parts],
            {i: part.logprobs[0] for i, part in enumerate(parts) if part.logprobs},
            {i: part.errors[0] for i, part in enumerate(parts) if part.errors},
        )


def is_plain_greedy(row: Row) -> bool:
    """Whether a row's next token is the one with the highest logit, and no log-probabilities are requested."""
    return row.sampling.temperature == 0 and row.sampling.logprobs is None and not changes_logits(row)


def sample_isolated(
    logits_of: Callable[[Tensor], Tensor],
    choose: Callable[[Tensor, list[Row]], Sampled],
    hidden: Tensor,
    rows: list[Row],
) -> Sampled:
    """Samples the next token of each row. If one row's parameters raise an exception, it becomes that row's error, and
    the other rows get their tokens. An exception of the model itself is raised.

    logits_of: hidden states [num_rows, hidden] → logits [num_rows, vocab]; choose: samples, and may overwrite logits
    """
    logits = logits_of(hidden)
    try:
        return choose(logits, rows)
    except Exception:  # one row's error must not cost the other rows their tokens
        parts = []
        for i, row in enumerate(rows):
            logits = logits_of(hidden[i : i + 1])  # computed again, because choose() may have overwritten them
            try:
                parts.append(choose(logits, [row]))
            except Exception as error:
                parts.append(Sampled([None], errors={0: RowError.of_bug(error)}))
        return Sampled.join(parts)


def sample(logits: Tensor, rows: list[Row], *, row_by_row: bool) -> Sampled:
    """Samples each row's next token. `logits` [num_rows, vocab] float32 is overwritten.

    `row_by_row` makes a row's bits independent of the others (for --deterministic): a reduction over several rows may
    be split among threads differently from a reduction over one.
    """
    if row_by_row and len(rows) > 1:
        return Sampled.join([sample(logits[i : i + 1], [row], row_by_row=False) for i, row in enumerate(rows)])
    best = logits.argmax(dim=-1)
    # argmax returns a NaN if there is one, so checking the best logit finds every unusable row.
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
        for i, token_id in _draw(logits, highest, rows, drawn).items():
            token_ids[i] = token_id
    for i in errors:
        token_ids[i] = None
    return Sampled(token_ids, _logprobs(raw, rows, token_ids), errors)


def _not_finite(logits: Tensor, best: Tensor) -> list[int]:
    """Returns the rows whose best logit is not finite."""
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


def _draw(logits: Tensor, highest: Tensor, rows: list[Row], drawn: list[int]) -> dict[int, int]:
    """Draws a token for each of the rows `drawn`, and returns them by row. highest: [num_rows, 1] finite"""
    wide = [i for i in drawn if not is_narrowed(rows[i].sampling, logits.shape[1])]
    order = wide + [i for i in drawn if is_narrowed(rows[i].sampling, logits.shape[1])]
    found = [likely(logits[wide], highest[wide], [rows[i].sampling for i in wide])] if wide else []
    for place, i in enumerate(order[len(wide) :], len(wide)):
        found.append(narrowed(logits[i], highest[i], rows[i].sampling, place))
    places, ids, scaled = map(np.concatenate, zip(*found, strict=True))
    keys = np.array([position_key(rows[i].sampling.seed, rows[i].num_tokens) for i in order], np.uint64)
    scores = scaled + race_noise(keys[places], ids)
    starts = np.searchsorted(places, np.arange(len(order)))
    return dict(zip(order, _argmax_segments(scores, ids, starts), strict=True))


def _argmax_segments(scores: NDArray[np.float64], ids: NDArray[np.int64], starts: NDArray[np.int64]) -> list[int]:
    ends = [*starts[1:], len(scores)]
    return [int(ids[start + int(scores[start:end].argmax())]) for start, end in zip(starts, ends, strict=True)]
