"""A step's inputs for the Triton kernels: packed on the host, and sent to the device in one copy."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from trunkline_kernels.gpu.device_batch import DeviceBatch
from trunkline_kernels.ragged_batch import KVLayer
from trunkline_worker.batch_rows import Row
from trunkline_worker.model.gpu_decoder import GpuDecoder
from trunkline_worker.plan import SequenceStep, StepPlan


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
    wide = [token_ids, positions, slots]
    narrow = [starts, computed + query_lens, tables, tiles]
    on_device = iter(_sent([array.astype(np.int64) for array in wide] + narrow, device))
    token_ids_, positions_, slots_, starts_, contexts_, tables_, tiles_ = on_device
    return DeviceInputs(
        DeviceBatch(token_ids_, positions_, slots_, starts_, contexts_, tables_, num_decodes, tiles_), ends.tolist()
    )


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


def _sent(arrays: list[NDArray[np.int64] | NDArray[np.int32]], device: torch.device) -> list[torch.Tensor]:
    """The arrays on the device: parts of one buffer, each aligned to 16 bytes."""
    sizes = [-(-array.nbytes // 16) * 16 for array in arrays]
    buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    host = buffer.numpy()
    offset = 0
    for array, size in zip(arrays, sizes, strict=True):
        host[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        offset += size
    # The pinned buffer may be freed before the copy is done: torch's host allocator waits for the stream.
    there = buffer.to(device, non_blocking=True)
    parts = torch.split(there, sizes)
    return [
        part[: array.nbytes].view(torch.int64 if array.dtype == np.int64 else torch.int32).view(array.shape)
        for part, array in zip(parts, arrays, strict=True)
    ]
