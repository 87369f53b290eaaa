"""Runs the model over a plan's new tokens, for each kind of decoder."""

from collections.abc import Callable
from functools import partial
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from trunkline_kernels.cpu.paged_batch import PagedBatch
from trunkline_kernels.ragged_batch import KVLayer, RaggedBatch
from trunkline_worker.model.cpu_decoder import CpuDecoder
from trunkline_worker.model.decoder import Decoder
from trunkline_worker.model.loading import LoadedModel
from trunkline_worker.runner.batch_rows import Row
from trunkline_worker.step.plan import SequenceStep, StepPlan

# Takes a plan and the rows of its steps. Returns hidden states [num_tokens, hidden], and the end of each step in them.
StepForward = Callable[[StepPlan, list[Row]], tuple[Tensor, list[int]]]


def step_forward(model: LoadedModel, kv: list[KVLayer], block_size: int) -> StepForward:
    """Returns the forward pass for the model's decoder."""
    decoder = model.decoder
    if isinstance(decoder, CpuDecoder):
        return partial(_with_c_kernels, decoder, kv, block_size)
    assert isinstance(decoder, Decoder), "the Triton kernels have a runner of their own"
    return partial(_with_references, decoder, kv, block_size, model.device)


def _with_c_kernels(
    decoder: CpuDecoder, kv: list[KVLayer], block_size: int, plan: StepPlan, rows: list[Row]
) -> tuple[Tensor, list[int]]:
    batch = build_paged_batch(plan.steps, rows, block_size)
    return decoder.forward(batch, kv, num_padding=plan.num_padding), _ends(plan)


def _with_references(
    decoder: Decoder,
    kv: list[KVLayer],
    block_size: int,
    device: torch.device,
    plan: StepPlan,
    rows: list[Row],
) -> tuple[Tensor, list[int]]:
    token_ids, batch = build_batch(plan.steps, rows, block_size, device)
    return decoder.forward(token_ids, batch, kv, num_padding=plan.num_padding), _ends(plan)


def _ends(plan: StepPlan) -> list[int]:
    return list(accumulate(step.num_new for step in plan.steps))


def build_paged_batch(steps: list[SequenceStep], rows: list[Row], block_size: int) -> PagedBatch:
    """Returns the step's batch for the C kernels. It points into the rows, which outlive the step."""
    counts = [step.num_new for step in steps]
    if len(steps) == sum(counts):
        token_ids = np.array([row.token(step.num_computed) for step, row in zip(steps, rows, strict=True)], np.int64)
    else:
        token_ids = np.concatenate(
            [row.tokens[s.num_computed : s.num_computed + s.num_new] for s, row in zip(steps, rows, strict=True)]
        )
    return PagedBatch(
        token_ids=torch.from_numpy(token_ids),
        starts=torch.from_numpy(np.cumsum([0, *counts], dtype=np.int64)),
        contexts=torch.from_numpy(np.array([step.num_computed + step.num_new for step in steps], np.int64)),
        tables=torch.from_numpy(np.array([row.blocks_address for row in rows], np.int64)),
        block_size=block_size,
    )


def build_batch(
    steps: list[SequenceStep], rows: list[Row], block_size: int, device: torch.device
) -> tuple[Tensor, RaggedBatch]:
    """Returns the step's token ids [num_tokens] int64, and its batch for the reference kernels."""
    block_tables = np.zeros((len(rows), max(row.num_blocks for row in rows)), np.int64)
    token_ids, positions, sequences = [], [], []
    for index, (step, row) in enumerate(zip(steps, rows, strict=True)):
        end = step.num_computed + step.num_new
        block_tables[index, : row.num_blocks] = row.blocks
        token_ids.append(row.tokens[step.num_computed : end])
        positions.append(np.arange(step.num_computed, end))
        sequences.append(np.full(step.num_new, index))
    where = np.concatenate(positions)
    slots = block_tables[np.concatenate(sequences), where // block_size] * block_size + where % block_size
    batch = RaggedBatch(
        positions=torch.from_numpy(where).to(device),
        slots=torch.from_numpy(slots).to(device),
        query_lens=[step.num_new for step in steps],
        context_lens=[step.num_computed + step.num_new for step in steps],
        block_tables=torch.from_numpy(block_tables),
        block_size=block_size,
    )
    return torch.from_numpy(np.concatenate(token_ids)).to(device), batch
