"""Copies of blocks within a runner's KV pool, in the order of its steps: each ends with the step that carries it."""

from collections.abc import Sequence

from trunkline_kernels.ragged_batch import KVPool
from trunkline_worker.step.plan import BlockCopy, CopyEnd, Tier


def copy_blocks(pool: KVPool, copies: Sequence[BlockCopy]) -> None:
    """Makes copies, or puts them on the device's queue, before the plan's steps are computed."""
    for copy in copies:
        assert copy.source.tier is copy.target.tier is Tier.DEVICE, f"there is no other pool: {copy}"
        pool.copy(copy.source.block, copy.target.block)


def all_arrived(copies: Sequence[BlockCopy]) -> list[CopyEnd]:
    """Returns the ends of copies whose step has been computed."""
    return [CopyEnd(copy.copy_id, arrived=True) for copy in copies]
