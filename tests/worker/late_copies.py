"""An executor that makes copies of blocks late, in any order and at times wrongly, and a rig that plans them."""

import random
from dataclasses import replace

from tests.worker.fake_executor import HistoryExecutor
from tests.worker.rig import BLOCK_SIZE, Rig
from trunkline_worker.cache.prefix_tree import Node
from trunkline_worker.scheduler.sequence_table import StepOutput
from trunkline_worker.step.plan import NO_MASKS, BlockCopy, CopyEnd, Masks, StepPlan, StepResult

Contents = list[int | None]
WRONG = -1  # a token that no history has


class LateCopies(HistoryExecutor):
    """Until a copy ends its target is poisoned. What it writes was read at its beginning, or is read at its end."""

    def __init__(self, *, num_blocks: int, block_size: int, draw: random.Random, failing: float) -> None:
        """failing: share of copies whose checksum is wrong"""
        super().__init__(num_blocks=num_blocks, block_size=block_size)
        self._draw = draw
        self._failing = failing
        self._wrong: Contents = [WRONG] * block_size
        self._under_way: list[tuple[BlockCopy, Contents | None]] = []
        self._ends: list[CopyEnd] = []  # since the last result
        self.num_late = self.num_failed = 0

    def forward(self, plan: StepPlan) -> None:
        for copy in plan.copies:
            self.poison(copy.target.block)
            early = self.contents(copy.source.block) if self._draw.random() < 0.5 else None
            self._under_way.append((copy, early))
        self._draw.shuffle(self._under_way)
        while self._under_way and self._draw.random() < (0.3 if plan.steps or self._ends else 1.0):
            self._finish(*self._under_way.pop(), plan)
        super().forward(replace(plan, copies=()))

    def _finish(self, copy: BlockCopy, early: Contents | None, plan: StepPlan) -> None:
        arrived = self._draw.random() >= self._failing
        contents = self.contents(copy.source.block) if early is None else early
        self.write(copy.target.block, contents if arrived else self._wrong)
        self._ends.append(CopyEnd(copy.copy_id, arrived))
        self.num_late += copy not in plan.copies
        self.num_failed += not arrived

    def sample(self, plan: StepPlan, masks: Masks = NO_MASKS) -> StepResult:
        result = super().sample(replace(plan, copies=()), masks)
        result.copies, self._ends = self._ends, []
        return result


class CopyingRig(Rig):
    """Copies chains of cached blocks between steps, and poisons every block that is free."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = BLOCK_SIZE,
        seed: int = 0,
        copying: float = 0.5,
        failing: float = 0.2,
        **options: object,
    ) -> None:
        super().__init__(num_blocks=num_blocks, block_size=block_size, **options)  # type: ignore[arg-type]
        self.draw = random.Random(seed)
        self.executor = self.late = LateCopies(
            num_blocks=num_blocks, block_size=block_size, draw=self.draw, failing=failing
        )
        self._copying = copying
        self.num_copies = 0

    def schedule(self) -> tuple[StepPlan, StepResult] | None:
        nodes = self.tree.nodes
        starved = bool(self.plans) and not self.plans[-1].steps  # by copies, which hold the blocks
        while nodes and not starved and self.scheduler.sequences and self.draw.random() < self._copying:
            chain = chain_of(nodes[self.draw.choice(list(nodes))])
            if not self.copy(chain, self.draw.randrange(len(chain))):
                break
        return super().schedule()

    def copy(self, chain: list[Node], first: int) -> bool:
        """Plans copies, if there are enough blocks."""
        fits = self.scheduler.copies.can_begin(chain, first)
        if fits:
            self.scheduler.copies.begin(chain, first)
            self.num_copies += len(chain) - first
            self.scheduler.check_integrity()
        return fits

    def commit(self, plan: StepPlan, result: StepResult) -> list[StepOutput]:
        outputs = super().commit(plan, result)
        for block in self.blocks._free:
            if self.blocks._node[block] is None:
                self.executor.poison(block)
        return outputs


def chain_of(node: Node) -> list[Node]:
    """The node and those before it, the first one first."""
    chain = [node]
    while chain[0].parent is not None and chain[0].parent.parent is not None:
        chain.insert(0, chain[0].parent)
    return chain
