"""A step's inputs for the Triton kernels: packed on the host, and sent to the device in one copy."""

from dataclasses import dataclass

import numpy as np
import torch

from trunkline_kernels.gpu.device_batch import DeviceBatch
from trunkline_kernels.ragged_batch import KVLayer
from trunkline_worker.batch_rows import Row
from trunkline_worker.model.gpu_decoder import GpuDecoder
from trunkline_worker.plan import SequenceStep, StepPlan
from trunkline_worker.to_device import to_device


@dataclass(frozen=True, slots=True)
class DeviceInputs:
    """A batch, and where a plan's entries are in it: kernels want decodes first."""

    batch: DeviceBatch
    ends: list[int]  # per entry of the plan's steps: the row after its last one


def device_inputs(
    steps: list[SequenceStep], rows: list[Row], block_size: int, decoder: GpuDecoder, device: torch.device
) -> DeviceInputs:
    """Of one step."""
    num_new = np.array([step.num_new for step in steps], np.int32)
    order = np.argsort(num_new != 1, kind="stable")
    query_lens = num_new[order]
    computed = np.array([step.num_computed for step in steps], np.int32)[order]
    starts = np.concatenate(([0], np.cumsum(query_lens, dtype=np.int32))).astype(np.int32)
    ends = np.empty(len(steps), np.int64)
    ends[order] = starts[1:]

    tables = np.zeros((len(steps), max(row.num_blocks for row in rows)), np.int32)
    token_ids = np.empty(int(starts[-1]), np.int64)
    for at, index in enumerate(order.tolist()):
        row, step = rows[index], steps[index]
        tables[at, : row.num_blocks] = row.blocks
        token_ids[starts[at] : starts[at + 1]] = row.tokens[step.num_computed : step.num_computed + step.num_new]
    sequences = np.repeat(np.arange(len(steps)), query_lens)
    positions = np.arange(len(token_ids)) - starts[sequences] + computed[sequences]
    slots = tables[sequences, positions // block_size].astype(np.int64) * block_size + positions % block_size
    num_decodes, tiles = decoder.tiles(query_lens, computed + query_lens)
    arrays = {
        "token_ids": token_ids,
        "positions": positions,
        "slots": slots,
        "query_starts": starts,
        "context_lens": computed + query_lens,
        "block_tables": tables,
        "tiles": tiles,
    }
    tensors = dict(zip(arrays, to_device(list(arrays.values()), device), strict=True))
    return DeviceInputs(DeviceBatch(**tensors, num_decodes=num_decodes), ends.tolist())


def with_triton_kernels(
    decoder: GpuDecoder,
    kv: list[KVLayer],
    block_size: int,
    device: torch.device,
    plan: StepPlan,
    rows: list[Row],
) -> tuple[torch.Tensor, list[int]]:
    """See step_forward.StepForward."""
    inputs = device_inputs(plan.steps, rows, block_size, decoder, device)
    return decoder.forward(inputs.batch, kv, num_padding=plan.num_padding), inputs.ends
