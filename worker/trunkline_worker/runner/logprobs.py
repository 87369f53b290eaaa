"""Log-probabilities of the model's own distribution, before penalties, bias and temperature."""

import torch
from torch import Tensor

from trunkline_worker.step.plan import PositionLogprobs


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
