"""Rows and logits for samplers."""

from typing import Any

import torch

from trunkline_kernels.gpu.device_rows import DeviceRows
from trunkline_worker.runner.batch_rows import Row
from trunkline_worker.runner.gpu.row_table import TableRow, sampling_columns
from trunkline_worker.runner.sampler import Sampled, sample
from trunkline_worker.step.plan import Sampling, SequenceStart

VOCAB = 211


def row_of(tokens: list[int] | None = None, prompt_len: int = 3, **sampling: Any) -> Row:
    tokens = tokens or [5, 6, 7]
    return Row(SequenceStart(1, tokens, prompt_len, [0], Sampling(**{"max_tokens": 100, **sampling})))


def logits_of(rows: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


def draw(logits: torch.Tensor, rows: list[Row], *, row_by_row: bool = False) -> Sampled:
    return sample(logits.clone(), rows, row_by_row=row_by_row)


def placed(rows: list[Row]) -> tuple[DeviceRows, list[TableRow]]:
    """Rows as they lie on the device, in another order, among others."""
    longest = max(row.num_tokens for row in rows) + 2
    device_rows = DeviceRows.allocate(
        num_rows=len(rows) + 3, max_tokens=longest, max_blocks=1, device=torch.device("cpu")
    )
    table = []
    for at, row in enumerate(rows):
        index = len(rows) + 1 - at
        table.append(TableRow(index, at, row.sampling, row.prompt_len, [], row.num_tokens, 0))
        device_rows.tokens[index, : row.num_tokens] = torch.from_numpy(row.tokens)
        device_rows.sampling[index] = torch.from_numpy(sampling_columns(table[-1]))
    return device_rows, table
