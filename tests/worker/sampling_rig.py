"""Rows and logits for samplers."""

from typing import Any

import torch

from trunkline_worker.batch_rows import Row
from trunkline_worker.plan import Sampling, SequenceStart
from trunkline_worker.sampler import Sampled, sample

VOCAB = 211


def row_of(tokens: list[int] | None = None, prompt_len: int = 3, **sampling: Any) -> Row:
    tokens = tokens or [5, 6, 7]
    return Row(SequenceStart(1, tokens, prompt_len, [0], Sampling(**{"max_tokens": 100, **sampling})))


def logits_of(rows: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


def draw(logits: torch.Tensor, rows: list[Row], *, row_by_row: bool = False) -> Sampled:
    return sample(logits.clone(), rows, row_by_row=row_by_row)
