"""Changes to a row of logits that depend on its sequence: bias, min_tokens, penalties."""

import numpy as np
import torch
from torch import Tensor

from trunkline_worker.batch_rows import Row, SampledRow


def changes_logits(row: SampledRow) -> bool:
    """Whether adjust_logits would do anything."""
    s = row.sampling
    return bool(
        s.logit_bias
        or row.num_output < s.min_tokens
        or s.repetition_penalty != 1.0
        or s.presence_penalty
        or s.frequency_penalty
    )


def adjust_logits(logits: Tensor, row: Row) -> None:
    """In place, in this order: bias; end tokens out while below min_tokens; repetition (over prompt and output, Keskar
    et al., 2019), frequency and presence penalties (over the output, as OpenAI defines them).

    logits: [vocab] float32. All state is the row's tokens, so a resumed sequence gets what it would have got.
    """
    s = row.sampling
    if s.logit_bias:
        ids, bias = zip(*s.logit_bias, strict=True)
        logits[torch.tensor(ids)] += torch.tensor(bias, dtype=logits.dtype)
    if row.num_output < s.min_tokens and s.end_token_ids:
        logits[torch.tensor(sorted(s.end_token_ids))] = float("-inf")
    if s.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(row.tokens))
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / s.repetition_penalty, values * s.repetition_penalty)
    if s.presence_penalty or s.frequency_penalty:
        output, counts = np.unique(row.tokens[row.prompt_len :], return_counts=True)
        penalty = s.frequency_penalty * counts + s.presence_penalty
        logits[torch.from_numpy(output)] -= torch.from_numpy(penalty).to(logits.dtype)
