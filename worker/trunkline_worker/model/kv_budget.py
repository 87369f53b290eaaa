"""The number of KV blocks that fit into a worker's memory."""

from pathlib import Path

import torch

from trunkline_worker.model.block_format import BlockFormat

GIB = 1 << 30


class OutOfMemory(Exception):
    """The device cannot hold a useful KV pool. The message is one line for the operator."""


def kv_block_count(
    block: BlockFormat, *, free_bytes: int, fraction: float, context_length: int, max_running: int
) -> int:
    """Returns the number of blocks within `fraction` of the free memory, at most what a full running set can use.

    Raises OutOfMemory if the blocks cannot hold one sequence of the full context length.
    """
    affordable = int(free_bytes * fraction) // block.num_bytes
    per_sequence = -(-context_length // block.block_size)
    if affordable < per_sequence:
        raise OutOfMemory(
            f"kv_memory_fraction={fraction} of {free_bytes / GIB:.2f} GiB free memory holds "
            f"{affordable * block.block_size} tokens, less than one context of {context_length}: lower "
            "--context-length, or give --kv-blocks"
        )
    return min(affordable, per_sequence * max_running)


def check_block_count(num_blocks: int, block: BlockFormat, *, free_bytes: int) -> None:
    """Raises OutOfMemory if `num_blocks` do not fit into the free memory."""
    if num_blocks * block.num_bytes > free_bytes:
        raise OutOfMemory(
            f"kv_blocks={num_blocks} take {num_blocks * block.num_bytes / GIB:.2f} GiB, and {free_bytes / GIB:.2f} GiB "
            f"are free: at most {free_bytes // block.num_bytes} fit"
        )


def free_bytes(device: torch.device) -> int:
    """Returns the free bytes of the GPU, or of the machine within its cgroup's limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(_available_bytes(), _cgroup_headroom_bytes())


def usable_bytes(device: torch.device, share: float) -> int:
    """Returns the bytes that a worker with this share of its GPU's memory may still allocate.

    The share applies to the GPU's total memory, so that the start order of workers on one GPU does not matter. The
    CUDA context is not counted: the pool leaves room for it, see kv_memory_fraction.
    """
    if device.type != "cuda" or share == 1.0:
        return free_bytes(device)
    free, total = torch.cuda.mem_get_info(device)
    return max(0, min(free, int(total * share) - torch.cuda.memory_reserved(device)))


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise OutOfMemory("/proc/meminfo does not tell MemAvailable: give --kv-blocks")


def _cgroup_headroom_bytes() -> int:
    """Returns the bytes that the container may still allocate; practically unlimited without a cgroup limit."""
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if not limit.exists() or not used.exists() or (text := limit.read_text().strip()) == "max":
        return 1 << 62
    return max(0, int(text) - int(used.read_text()))
