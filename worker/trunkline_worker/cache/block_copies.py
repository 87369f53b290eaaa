"""Copies of cached blocks: plans carry them, executors make them, results say which have arrived.

    begin()          pins the source, and all blocks before it in its chain; takes the target, which is loading
    take_planned()   the next plan carries the copy
    end()            a result says whether it has arrived: if so, the target is published as one more copy of its node;
                     if not, the target is free, and a sequence that could have used it computes instead

Results come late and in any order, so a block that is pinned or loading is never taken meanwhile. A source is read once
the steps that wrote it are committed: it is a node of the prefix tree, and nodes are published by commits.

Chains are pinned because the cached set must stay prefix-closed: a block that is freed alone would outlive its parent.
"""

from dataclasses import dataclass, field

from trunkline_worker.cache.blocks import KVBlocks
from trunkline_worker.cache.prefix_tree import Node
from trunkline_worker.step.plan import BlockCopy, BlockPlace, CopyEnd, Tier


@dataclass(slots=True, eq=False)
class _Chain:
    """Blocks that are pinned together until all copies of them have ended."""

    table: list[int]  # sources, and blocks before them
    num_left: int  # copies that have not ended
    arrived: dict[int, int] = field(default_factory=dict)  # targets by index in `table`

    @property
    def blocks(self) -> list[int]:
        """All blocks, in the order in which KVBlocks.unpin() takes them. Of two copies the older is taken first."""
        blocks: list[int] = []
        for index, source in enumerate(self.table):
            if index in self.arrived:
                blocks.append(self.arrived[index])
            blocks.append(source)
        return blocks


class BlockCopies:
    """Copies that are planned or under way."""

    def __init__(self, blocks: KVBlocks) -> None:
        self._blocks = blocks
        self._last_id = 0
        self._planned: list[BlockCopy] = []
        self._begun: dict[int, tuple[_Chain, int, Node, int]] = {}  # by copy id: chain, index in it, node, target

    @property
    def has_any(self) -> bool:
        """Whether a copy has not ended."""
        return bool(self._begun)

    def can_begin(self, chain: list[Node], first: int) -> bool:
        """Whether begin() has enough blocks to take."""
        return self._blocks.can_copy(chain, len(chain) - first)

    def begin(self, chain: list[Node], first: int) -> None:
        """Plans copies of chain[first:]. Do not begin any after a plan without entries: sequences wait for the blocks.

        chain: cached blocks that follow one another, from a root's child on
        """
        pinned = _Chain(self._blocks.pin(chain), len(chain) - first)
        for index in range(first, len(chain)):
            target = self._blocks.begin_load()
            self._last_id += 1
            places = BlockPlace(Tier.DEVICE, pinned.table[index]), BlockPlace(Tier.DEVICE, target)
            self._planned.append(BlockCopy(self._last_id, *places))
            self._begun[self._last_id] = pinned, index, chain[index], target

    def take_planned(self) -> list[BlockCopy]:
        """Copies for the next plan; called once for each plan."""
        planned, self._planned = self._planned, []
        return planned

    def end(self, ends: list[CopyEnd]) -> None:
        """Publishes the targets of copies that have arrived, and frees those of the others."""
        for copy_id, arrived in ends:
            chain, index, node, target = self._begun.pop(copy_id)
            self._blocks.end_load(target, node if arrived else None)
            if arrived:
                chain.arrived[index] = target
            chain.num_left -= 1
            if not chain.num_left:
                self._blocks.unpin(chain.blocks)
