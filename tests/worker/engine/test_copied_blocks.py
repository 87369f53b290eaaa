"""Blocks of a real pool that are copied late, out of order and at times wrongly, while all that is free is NaN."""

import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.worker.engine_rig import Collected, drive, make_engine, make_submit
from tests.worker.late_copies import chain_of
from trunkline_worker.engine.engine import Engine
from trunkline_worker.engine.step_runner import step_runner
from trunkline_worker.model.loading import load_model
from trunkline_worker.runner.gpu.gpu_runner import GpuRunner
from trunkline_worker.runner.step_thread import InlineExecutor
from trunkline_worker.runner.torch_runner import TorchRunner
from trunkline_worker.settings import EngineSettings
from trunkline_worker.step.plan import (
    BlockCopy,
    BlockPlace,
    CopyEnd,
    Sampling,
    SequenceStart,
    SequenceStep,
    StepPlan,
    StepResult,
    Tier,
)


class LateCopies(InlineExecutor):
    """Makes the copies of plans itself, in a runner's pool."""

    def __init__(self, engine: Engine, draw: random.Random) -> None:
        assert isinstance(engine.executor, InlineExecutor)
        runner = engine.executor._runner
        assert isinstance(runner, TorchRunner)
        super().__init__(runner)
        self._kv, self._scheduler, self._draw = runner._pool, engine.scheduler, draw
        self._under_way: list[BlockCopy] = []
        self.num_late = self.num_failed = 0
        self.starves = False  # nothing can be computed: copies hold the blocks

    def launch(self, plan: StepPlan) -> None:
        self.starves = not plan.steps
        self._under_way += plan.copies
        self._poison()
        super().launch(replace(plan, copies=()))

    def collect(self) -> StepResult:
        self._draw.shuffle(self._under_way)
        ends: list[CopyEnd] = []
        while self._under_way and self._draw.random() < (0.3 if self._plans[0].steps or ends else 1.0):
            ends.append(self._ended(self._under_way.pop()))
        return replace(super().collect(), copies=ends)

    def _ended(self, copy: BlockCopy) -> CopyEnd:
        arrived = self._draw.random() < 0.6
        if arrived:
            self._kv.copy(copy.source.block, copy.target.block)
        self.num_late += bool(self._under_way)
        self.num_failed += not arrived
        return CopyEnd(copy.copy_id, arrived)

    def _poison(self) -> None:
        """Fills what is free, and what is not yet written."""
        blocks = self._scheduler.blocks
        free = [block for block in blocks._free if blocks._node[block] is None]
        for block in (*free, *(copy.target.block for copy in self._under_way)):
            self._kv.blocks[block] = math.nan


def bits(collected: Collected) -> dict[int, list[tuple[int, float]]]:
    return {
        handle: [(entry.chosen.token_id, entry.chosen.logprob) for output in outputs for entry in output.logprobs]
        for handle, outputs in sorted(collected.outputs.items())
    }


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_outputs_are_those_without_copies_bit_for_bit(kernels: str) -> None:
    draw = random.Random(5)
    prefix = draw.choices(range(60, 400), k=70)
    submits = [
        make_submit(
            handle, [*prefix[: draw.choice([0, 20, 70])], *draw.choices(range(60, 400), k=draw.randint(1, 40))],
            max_tokens=draw.randint(1, 12), ignore_eos=True, logprobs=1, temperature=draw.choice([0.0, 1.0]), seed=4,
        )
        for handle in range(1, 25)
    ]  # fmt: skip
    options: dict[str, Any] = {
        "deterministic": True,
        "kv_blocks": 48,
        "max_step_tokens": 48,
        "block_size": 8,
        "kernels": kernels,
    }
    alone = bits(drive(make_engine(**options), submits))
    engine = make_engine(**options)
    engine.executor = late = LateCopies(engine, draw)
    begun = 0

    def copy(step: int, collected: Collected) -> None:
        nonlocal begun
        scheduler = engine.scheduler
        while not late.starves and scheduler.sequences and scheduler.blocks.tree.nodes and draw.random() < 0.5:
            chain = chain_of(draw.choice(list(scheduler.blocks.tree.nodes.values())))
            first = draw.randrange(len(chain))
            if not scheduler.copies.can_begin(chain, first):
                return
            scheduler.copies.begin(chain, first)
            begun += len(chain) - first

    assert bits(drive(engine, submits, each_step=copy)) == alone
    assert begun > 30
    assert late.num_late > 10
    assert late.num_failed > 5


def place(block: int) -> BlockPlace:
    return BlockPlace(Tier.DEVICE, block)


@pytest.mark.parametrize("kernels", ["auto", "torch", "triton"])
def test_runners_copy_blocks_before_they_compute_a_step(shallow_model: Path, kernels: str) -> None:
    """A sequence continues on copies of another one's blocks, one of which is overwritten in the same step."""
    settings = EngineSettings(
        str(shallow_model), dtype="float32", max_step_tokens=40, max_running_requests=3, kernels=kernels
    )
    model = load_model(shallow_model, dtype="float32", device=torch.device("cpu"), kernels=kernels)
    runner = step_runner(model, settings, num_blocks=8)
    assert isinstance(runner, TorchRunner | GpuRunner)
    whole, prompt, greedy = runner._pool.whole_blocks, list(range(60, 93)), Sampling(8, temperature=0.0)

    def start(sequence_id: int, table: list[int]) -> SequenceStart:
        return SequenceStart(sequence_id, prompt, len(prompt), table, greedy)

    first = StepPlan(1, [SequenceStep(1, 0, 0, 33, (), True)], [start(1, [0, 1, 2])])
    (expected,) = runner.begin(first)().token_ids
    before = whole.clone()
    steps = [SequenceStep(2, 0, 32, 1, (), True), SequenceStep(3, 0, 0, 7, (), True)]
    starts = [start(2, [6, 5, 4]), SequenceStart(3, [5] * 7, 7, [1], greedy)]
    copies = [BlockCopy(1, place(0), place(6)), BlockCopy(2, place(1), place(5))]
    result = runner.begin(StepPlan(2, steps, starts, [1], copies=copies))()
    assert result.copies == [CopyEnd(1, True), CopyEnd(2, True)]
    assert result.token_ids[0] == expected
    assert torch.equal(whole[[6, 5]], before[[0, 1]])
    assert not torch.equal(whole[1], before[1])

    result = runner.begin(StepPlan(3, [], ended=[2, 3], copies=[BlockCopy(9, place(6), place(7))]))()
    assert (result.token_ids, result.copies) == ([], [CopyEnd(9, True)])
    assert torch.equal(whole[7], whole[6])
