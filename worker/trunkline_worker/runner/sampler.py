"""Chooses tokens from logits.

Order: log-probabilities of the unchanged distribution; bias, penalties and min_tokens (adjust_logits); masks; the most
likely token if the temperature is 0; otherwise temperature, the candidates (top_k, then top_p over the tokens that
top_k keeps, and min_p), and a draw.

top_k keeps every token whose logit is at least the k-th largest one, so equal logits are treated equally. top_p keeps
the smallest nucleus: of equal logits at its edge, those of the lowest token ids.

The row's highest logit is subtracted before the division by the temperature. The highest is then 0 and the others are
negative, so an overflow never changes a value that is compared or drawn, and the most likely token always stays.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trunkline_kernels import token_masks
from trunkline_kernels.token_masks import RowMasks
from trunkline_worker.runner.batch_rows import Row, SampledRow
from trunkline_worker.step.plan import PositionLogprobs, RowError, Sampling
from trunkline_worker.step.sampling_key import NOISE_SPREAD, position_key, race_noise

LARGEST = torch.finfo(torch.float32).max
# The nucleus of top_p is searched in this many most likely tokens before the whole row is sorted.
NUCLEUS_GUESS = 256
NOT_FINITE = RowError("the model's output is not finite")
NOTHING_LEFT = RowError("no token is left that may be chosen")
FAILURES = {-1: NOT_FINITE, -2: NOTHING_LEFT}  # what kernels return instead of a token


def changes_logits(row: SampledRow) -> bool:
    """Whether adjust_logits() changes this row's logits."""
    s = row.sampling
    return bool(
        s.logit_bias
        or row.num_output < s.min_tokens
        or s.repetition_penalty != 1.0
        or s.presence_penalty
        or s.frequency_penalty
    )


def is_penalised(s: Sampling) -> bool:
    """Whether penalties are among what changes a row's logits. Not called by changes_logits(), which each step asks of
    every row."""
    return bool(s.repetition_penalty != 1.0 or s.presence_penalty or s.frequency_penalty)


def adjust_logits(logits: Tensor, row: Row) -> None:
    """Changes logits in place, in this order: bias; repetition (over prompt and output, Keskar et al., 2019), frequency
    and presence penalties (over the output, as OpenAI defines them); end tokens to -inf while below min_tokens.

    A finite logit stays finite: instead of overflowing, it becomes the largest number of its sign.

    logits: [vocab] float32. The only state is the row's tokens, so a resumed sequence gets the same logits.
    """
    s = row.sampling
    if s.logit_bias:
        ids, bias = zip(*s.logit_bias, strict=True)
        at = torch.tensor(ids)
        logits[at] = _bounded(logits[at] + torch.tensor(bias, dtype=logits.dtype), logits[at])
    if s.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(row.tokens))
        values = logits[seen]
        penalised = torch.where(values > 0, values / s.repetition_penalty, values * s.repetition_penalty)
        logits[seen] = _bounded(penalised, values)
    if s.presence_penalty or s.frequency_penalty:
        output, counts = np.unique(row.tokens[row.prompt_len :], return_counts=True)
        at = torch.from_numpy(output)
        penalty = torch.from_numpy(s.frequency_penalty * counts + s.presence_penalty).to(logits.dtype)
        logits[at] = _bounded(logits[at] - penalty, logits[at])
    if row.num_output < s.min_tokens and s.end_token_ids:
        logits[torch.tensor(sorted(s.end_token_ids))] = float("-inf")


def _bounded(changed: Tensor, before: Tensor) -> Tensor:
    """Returns `changed`, clamped to finite values where `before` was finite."""
    return torch.where(before.isfinite(), changed.clamp(-LARGEST, LARGEST), changed)


class Candidates(NamedTuple):
    """Candidate tokens of one or several rows, ordered by row, then by token id."""

    rows: NDArray[np.int64]  # [num_candidates] index of the row
    ids: NDArray[np.int64]  # [num_candidates] token id
    scaled: NDArray[np.float64]  # [num_candidates] (logit - highest logit) / temperature


def is_narrowed(row: Row, vocab: int) -> bool:
    """Whether top_k or top_p may exclude tokens, or a mask leaves few."""
    s = row.sampling
    return 0 < s.top_k < vocab or s.top_p < 1.0 or _leaves_few(row)


def likely(logits: Tensor, highest: Tensor, samplings: list[Sampling]) -> Candidates:
    """Returns the candidates of rows that are not narrowed.

    logits: [num_rows, vocab], overwritten; highest: [num_rows, 1] finite
    """
    temperature = torch.tensor([s.temperature for s in samplings])[:, None]
    scaled = logits.sub_(highest).div_(temperature)
    least = torch.tensor([_least(s) for s in samplings])[:, None]
    rows, ids = (scaled >= least).nonzero(as_tuple=True)
    return Candidates(rows.numpy(), ids.numpy(), scaled[rows, ids].numpy().astype(np.float64))


def narrowed(logits: Tensor, highest: Tensor, row: Row, index: int) -> Candidates:
    """Returns the candidates of one row that is narrowed. logits: [vocab]; highest: [1] finite; index: the row's"""
    s, values = row.sampling, logits
    ids: Tensor | None = None
    if _leaves_few(row):
        ids = (logits > -math.inf).nonzero()[:, 0]
        values = logits[ids]
    if 0 < s.top_k < len(values):
        places = (values >= values.topk(s.top_k).values[-1]).nonzero()[:, 0]
        ids, values = places if ids is None else ids[places], values[places]
    scaled = (values - highest) / s.temperature
    kept = scaled >= _least(s)
    if s.top_p < 1.0:
        kept &= _nucleus(values, scaled.exp(), s.top_p)
    places = kept.nonzero()[:, 0]
    ids = places if ids is None else ids[places]
    return Candidates(np.full(len(ids), index, np.int64), ids.numpy(), scaled[places].numpy().astype(np.float64))


def _leaves_few(row: Row) -> bool:
    """Whether a mask leaves less than a quarter of the tokens: so few are gathered, and only they are computed with."""
    return row.mask is not None and 4 * int(np.bitwise_count(row.mask.view(np.uint32)).sum()) < 32 * len(row.mask)


def _least(s: Sampling) -> float:
    """Returns the smallest scaled logit that can be drawn. Noise cannot make up for more than its own spread."""
    return max(-NOISE_SPREAD, math.log(s.min_p)) if s.min_p else -NOISE_SPREAD


def _nucleus(logits: Tensor, weights: Tensor, top_p: float) -> Tensor:
    """Returns a mask of the fewest tokens whose weights sum to top_p of the total: [num_tokens] bool, not all false.

    logits: [num_tokens]; they define the order, because they distinguish more tokens than the weights do
    """
    target = top_p * float(weights.sum(dtype=torch.float64))
    size = min(NUCLEUS_GUESS, len(logits))
    while True:
        largest = logits.topk(size)
        mass = weights[largest.indices].double().cumsum(0)
        if size == len(logits) or float(mass[-1]) >= target:
            break
        size = len(logits)
    count = min(int((mass < target).sum()) + 1, size)
    edge = largest.values[count - 1]
    inside = logits > edge
    equal = (logits == edge).nonzero()[:, 0]
    inside[equal[: count - int(inside.sum())]] = True
    return inside


def position_logprobs(logits: Tensor, token_ids: list[int], num_top: list[int]) -> list[PositionLogprobs]:
    """Returns the log-probabilities of each position's token and of its top tokens.

    logits: [num_rows, vocab] float32; token_ids: the token at each position; num_top: number of top tokens of each
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    most = min(max(num_top), logits.shape[1])
    values, ids = logprobs.topk(most, dim=-1) if most else (logprobs[:, :0], logprobs[:, :0].long())
    columns = zip(token_ids, chosen[:, 0].tolist(), ranks.tolist(), ids.tolist(), values.tolist(), num_top, strict=True)
    return [
        PositionLogprobs(token_id, logprob, rank, list(zip(row_ids, row_values, strict=True))[:count])
        for token_id, logprob, rank, row_ids, row_values, count in columns
    ]


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
    """Whether a row's next token is the one with the highest logit that its mask allows, and no log-probabilities are
    requested."""
    s = row.sampling
    return s.temperature == 0 and s.logprobs is None and not changes_logits(row)


def masks_of(rows: list[Row]) -> RowMasks | None:
    """The masks of the rows that have one; None if no row has."""
    masked = [i for i, row in enumerate(rows) if row.mask is not None]
    if not masked:
        return None
    words = np.stack([row.mask for row in rows if row.mask is not None])
    return RowMasks(torch.tensor(masked), torch.from_numpy(words))


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


# Sets the logits of tokens that masks exclude to -inf: token_masks.exclude(), or a kernel.
Exclude = Callable[[Tensor, RowMasks], None]


def sample(logits: Tensor, rows: list[Row], *, row_by_row: bool, exclude: Exclude = token_masks.exclude) -> Sampled:
    """Samples each row's next token. `logits` [num_rows, vocab] float32 is overwritten.

    `row_by_row` makes a row's bits independent of the others (for --deterministic): a reduction over several rows may
    be split among threads differently from a reduction over one.
    """
    if row_by_row and len(rows) > 1:
        return Sampled.join(
            [sample(logits[i : i + 1], [row], row_by_row=False, exclude=exclude) for i, row in enumerate(rows)]
        )
    best = logits.argmax(dim=-1)
    # argmax returns a NaN if there is one, so checking the best logit finds every unusable row.
    errors = dict.fromkeys(_not_finite(logits, best), NOT_FINITE)
    raw = _raw_copy(logits, rows)
    changed = [i for i, row in enumerate(rows) if changes_logits(row) and row.forced is None and i not in errors]
    for i in changed:
        adjust_logits(logits[i], rows[i])
    masks = masks_of(rows)
    if masks is not None:
        exclude(logits, masks)
    if changed or masks is not None:
        best = logits.argmax(dim=-1)
        errors |= {i: NOTHING_LEFT for i in _not_finite(logits, best) if i not in errors}
    token_ids: list[int | None] = list(best.tolist())
    drawn = [i for i, row in enumerate(rows) if row.sampling.temperature > 0 and row.forced is None and i not in errors]
    if drawn:
        highest = logits.gather(1, best[:, None])
        for i, token_id in _draw(logits, highest, rows, drawn).items():
            token_ids[i] = token_id
    for i, row in enumerate(rows):
        if row.forced is not None:
            token_ids[i] = row.forced
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
    narrow = [i for i in drawn if is_narrowed(rows[i], logits.shape[1])]
    wide = [i for i in drawn if i not in narrow] if narrow else drawn
    order = wide + narrow
    found = [likely(logits[wide], highest[wide], [rows[i].sampling for i in wide])] if wide else []
    for place, i in enumerate(order[len(wide) :], len(wide)):
        found.append(narrowed(logits[i], highest[i], rows[i], place))
    places, ids, scaled = map(np.concatenate, zip(*found, strict=True))
    keys = np.array([position_key(rows[i].sampling.seed, rows[i].num_tokens) for i in order], np.uint64)
    scores = scaled + race_noise(keys[places], ids)
    starts = np.searchsorted(places, np.arange(len(order)))
    return dict(zip(order, _argmax_segments(scores, ids, starts), strict=True))


def _argmax_segments(scores: NDArray[np.float64], ids: NDArray[np.int64], starts: NDArray[np.int64]) -> list[int]:
    ends = [*starts[1:], len(scores)]
    return [int(ids[start + int(scores[start:end].argmax())]) for start, end in zip(starts, ends, strict=True)]
