"""Changes to a row of logits that depend on its sequence: bias, penalties, min_tokens."""

import numpy as np
import torch
from torch import Tensor

from trunkline_worker.runner.batch_rows import Row, SampledRow

LARGEST = torch.finfo(torch.float32).max


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
