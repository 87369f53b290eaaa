"""The GPU's runner, interpreted: rows that stay, padded shapes, shared prefixes, steps begun before the last result."""

import gc
import itertools
import random
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.worker.engine_rig import drive, make_engine, make_submit
from trunkline_kernels.gpu.device_rows import DeviceRows, gather_rows, step_inputs, write_segments
from trunkline_kernels.gpu.shared_prefix import shared_prefix
from trunkline_worker.model import gpu_decoder
from trunkline_worker.model.loading import load_model
from trunkline_worker.runner.gpu import prefix_groups
from trunkline_worker.runner.gpu.gpu_runner import GpuRunner
from trunkline_worker.runner.gpu.prefix_groups import PrefixGroup, PrefixGroups, prefix_tiles
from trunkline_worker.runner.gpu.row_table import RowTable, TableRow
from trunkline_worker.runner.gpu.step_programs import decode_sizes
from trunkline_worker.runner.sampler import NOTHING_LEFT
from trunkline_worker.runner.step_thread import QueueingExecutor, ThreadedExecutor
from trunkline_worker.settings import EngineSettings
from trunkline_worker.step.plan import Masks, Sampling, SequenceStart, SequenceStep, StepPlan

DRAW = random.Random(11)
CPU = torch.device("cpu")


def row_of(index: int, serial: int = 0) -> TableRow:
    return TableRow(index, serial, Sampling(1), 1, [], 1, 0)


def test_segments_and_gathered_rows() -> None:
    target = torch.zeros(5, 3000, dtype=torch.int32)
    data = torch.arange(2600, dtype=torch.int32)
    write_segments(target, torch.tensor([[3, 10, 2500, 50], [0, 0, 1, 7], [4, 2999, 1, 8]]).int(), data, 2500)
    assert target[3, 10:2510].tolist() == list(range(50, 2550))
    assert (int(target[0, 0]), int(target[4, 2999]), int(target.sum())) == (7, 8, sum(range(50, 2550)) + 15)
    source = torch.randn(9, 70)
    for kind in (torch.int32, torch.int64):
        index = torch.tensor([8, 0, 0, 3], dtype=kind)
        assert torch.equal(gather_rows(source, index), source[index.long()])


@pytest.mark.parametrize("padding", [(0, 0), (3, 2), (200, 1)])
def test_inputs_come_from_the_rows(padding: tuple[int, int]) -> None:
    extra_tokens, extra_seqs = padding
    block_size, shapes = 4, [(1, 7), (150, 150), (3, 19)]  # new tokens, context
    rows = DeviceRows.allocate(num_rows=6, max_tokens=160, max_blocks=40, device=CPU)
    rows.tokens.copy_(torch.randint(0, 999, rows.tokens.shape))
    rows.block_tables.copy_(torch.randperm(240).view(6, 40))
    where = [4, 0, 5]
    new = sum(count for count, _ in shapes)
    starts = np.cumsum([0, *(count for count, _ in shapes), *[0] * extra_seqs])
    outputs = [torch.full((new + extra_tokens,), 77) for _ in range(3)]
    step_inputs(
        rows,
        query_starts=torch.from_numpy(starts).int(),
        context_lens=torch.tensor([context for _, context in shapes] + [0] * extra_seqs).int(),
        rows=torch.tensor(where + [0] * extra_seqs).int(),
        token_ids=outputs[0], positions=outputs[1], slots=outputs[2],
        block_size=block_size,
        longest=max(150, extra_tokens),
    )  # fmt: skip
    positions = torch.cat([torch.arange(context - count, context) for count, context in shapes])
    of = torch.tensor(where).repeat_interleave(torch.tensor([count for count, _ in shapes]))
    assert torch.equal(outputs[0][:new], rows.tokens[of, positions].long())
    assert torch.equal(outputs[1][:new], positions)
    blocks = rows.block_tables[of, positions // block_size].long()
    assert torch.equal(outputs[2][:new], blocks * block_size + positions % block_size)
    assert outputs[0][new:].tolist() == outputs[1][new:].tolist() == [0] * extra_tokens
    assert outputs[2][new:].tolist() == [-1] * extra_tokens


def test_the_rows_follow_the_plans() -> None:
    table = RowTable(num_rows=2, max_tokens=40, max_blocks=10, device=CPU)
    first = SequenceStart(1, [5, 6, 7], 2, [3], Sampling(9, seed=(1 << 64) - 3, temperature=0.5, top_k=1 << 40))
    second = SequenceStart(2, [8], 1, [4], Sampling(9))
    step = SequenceStep(1, 0, 0, 3, (), True)
    rows = table.apply(StepPlan(1, [step, SequenceStep(2, 0, 0, 1, (), True)], [first, second]))
    assert {row.index for row in rows} == {0, 1}
    one, two = (row.index for row in rows)
    assert table.device_rows.tokens[one, :3].tolist() == [5, 6, 7]
    rows[0].num_tokens += 1
    table.apply(StepPlan(2, [SequenceStep(1, 0, 3, 1, [9], True)], ended=[2]))
    assert table.device_rows.block_tables[one, :2].tolist() == table.block_tables[one, :2].tolist() == [3, 9]
    third = SequenceStart(3, [1, 2], 2, [6], Sampling(9))
    (row,) = table.apply(StepPlan(3, [SequenceStep(3, 0, 0, 2, (), True)], [third]))
    assert row.index == two, "the row of the one that ended"
    with pytest.raises(AssertionError, match="the plan computes up to 9"):
        table.apply(StepPlan(4, [SequenceStep(3, 0, 8, 1, (), True)]))


def test_groups_are_found_and_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_groups, "LEAST_SAVED", 1)
    tables = np.zeros((12, 30), np.int32)
    for index in range(12):
        tables[index] = 1000 * (index + 1) + np.arange(30)
    tables[:5, :20] = np.arange(20)  # five begin with the same twenty blocks
    tables[6:11, :2] = np.arange(500, 502)  # five with the same two
    groups = PrefixGroups(tables, 16)
    rows = [row_of(index, serial=index) for index in range(12)]
    computed = np.full(12, 400, np.int32)
    (found,) = groups.find(rows, computed, tile_seqs=4)
    assert (found.members.tolist(), found.num_tokens) == ([0, 1, 2, 3, 4], 320)
    computed[2] = 100  # it has computed only the first six blocks
    (again,) = groups.find(rows, computed, tile_seqs=4)
    assert again.num_tokens == 320, "members are the same, so is their prefix"
    rows[2] = row_of(2, serial=99)
    assert groups.find(rows, computed, tile_seqs=4) == [], "another one, and 96 tokens are too few"
    assert groups.find(rows[:3], computed[:3], tile_seqs=4) == []
    rows[2], computed[2] = row_of(2, serial=100), 400
    assert groups.find(rows, computed, tile_seqs=4)
    monkeypatch.setattr(prefix_groups, "LEAST_SAVED", 10_000)
    assert groups.find(rows, computed, tile_seqs=4) == [], "too little is saved"


@pytest.mark.parametrize("seed", range(20))
def test_tiles_cover_every_prefix_once(seed: int) -> None:
    draw = random.Random(seed)
    tile_seqs, most = draw.choice([1, 3, 32]), draw.randrange(20, 60)
    groups, at = [], 0
    for _ in range(draw.randrange(1, 6)):
        members = draw.randrange(4, 20)
        groups.append(PrefixGroup(np.arange(at, at + members), 16 * draw.randrange(1, 2000)))
        at += members
    rows = [row_of(100 + index) for index in range(at + 2)]
    found = prefix_tiles(groups, rows, tile_seqs=tile_seqs, most=most, align=128)
    assert len(found.tiles) <= most
    covered = 0
    for group in groups:
        for member in group.members.tolist():
            tokens, first, count = found.of_sequence[member].tolist()
            if not count:
                continue
            covered += 1
            assert tokens == group.num_tokens
            tiles = found.tiles[first : first + count]
            assert tiles[0, 3] == 0
            assert tiles[-1, 4] == tokens
            assert (tiles[1:, 3] == tiles[:-1, 4]).all()
            assert (tiles[:, 3] % 128 == 0).all()
            assert ((tiles[:, 1] <= member) & (member < tiles[:, 1] + tiles[:, 2]) & (tiles[:, 2] <= tile_seqs)).all()
            assert (tiles[:, 0] == rows[int(group.members[0])].index).all()
    assert covered
    assert (found.of_sequence[at:] == 0).all()


def test_the_ladder_wastes_little() -> None:
    sizes = decode_sizes(300)
    assert sizes[:6] == [1, 2, 4, 8, 16, 24]
    assert sizes[-1] == 300
    assert decode_sizes(1) == [1]
    assert decode_sizes(6) == [1, 2, 4, 6]
    assert all(b - a <= max(a, 32) for a, b in itertools.pairwise(sizes))


def outputs(model: Path, prompts: list[list[int]], **options: Any) -> dict[int, list[int]]:
    # Without a target, so that the first steps are not kept small until it is known what steps take.
    engine = make_engine(model, kv_blocks=96, block_size=4, itl_target_ms=0.0, **options)
    submits = [make_submit(n, prompt, max_tokens=5, ignore_eos=True) for n, prompt in enumerate(prompts)]
    return drive(engine, submits).tokens


@pytest.mark.slow
def test_decodes_that_share_a_prefix_get_what_they_would_alone(
    shallow_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_groups, "LEAST_SAVED", 1)
    monkeypatch.setattr(prefix_groups, "SHORTEST_PREFIX", 4)
    shared = [DRAW.randrange(5, 400) for _ in range(21)]
    prompts = [[*shared, 100 + n, 7 + n] for n in range(5)] + [[9, 8, 7]]
    seen: list[int] = []

    def counted(q: torch.Tensor, kv: Any, prefixes: Any, **options: Any) -> None:
        seen.append(int((prefixes.of_sequence[:, 0] > 0).sum()))
        real(q, kv, prefixes, **options)

    real = shared_prefix
    monkeypatch.setattr(gpu_decoder, "shared_prefix", counted)
    # The first one computes the prefix, the others find it.
    assert outputs(shallow_model, prompts, kernels="triton") == outputs(shallow_model, prompts, kernels="torch")
    assert max(seen) == 5


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"max_step_tokens": 9}, {"max_step_tokens": 9, "deterministic": True}], ids=str)
def test_a_step_may_begin_before_the_one_before_is_known(options: dict[str, Any], shallow_model: Path) -> None:
    prompts = [[DRAW.randrange(5, 400) for _ in range(length)] for length in (3, 17, 30)]
    expected = outputs(shallow_model, prompts, kernels="torch")
    engine = make_engine(shallow_model, kv_blocks=96, block_size=4, kernels="triton", run_ahead=1, **options)
    # As on a GPU: launched by the engine's thread, waited for by another.
    runner = engine.executor._runner  # type: ignore[attr-defined]
    engine.executor = queueing = QueueingExecutor(runner, 1)
    submits = [make_submit(n, prompt, max_tokens=5, ignore_eos=True) for n, prompt in enumerate(prompts)]
    assert drive(engine, submits).tokens == expected
    queueing.close()


def test_what_fails_at_launch_is_raised_when_collected() -> None:
    class Broken:
        queues = True
        later_bytes = 0

        def begin(self, plan: StepPlan) -> Callable[[], Any]:
            raise RuntimeError("no more memory")

        def forward(self, plan: StepPlan) -> None:
            raise RuntimeError("no more memory")

        def sample(self, plan: StepPlan, masks: Masks) -> Callable[[], Any]:
            raise NotImplementedError

        def forget(self, sequence_ids: list[int]) -> None:
            raise NotImplementedError

    executor = QueueingExecutor(Broken(), 1)
    for plan in (StepPlan(1, []), StepPlan(2, [], masked=[0])):
        executor.launch(plan)
        if plan.needs_host:
            executor.sample({})
        with pytest.raises(RuntimeError, match="no more memory"):
            executor.collect()
    executor.close()


def test_a_closed_executor_lets_go_of_its_runner() -> None:
    class Idle:
        queues = True
        later_bytes = 0

        def begin(self, plan: StepPlan) -> Callable[[], Any]:
            raise NotImplementedError

        def forward(self, plan: StepPlan) -> None:
            raise NotImplementedError

        def sample(self, plan: StepPlan, masks: Masks) -> Callable[[], Any]:
            raise NotImplementedError

        def forget(self, sequence_ids: list[int]) -> None:
            raise NotImplementedError

    runner = Idle()
    forgotten = weakref.ref(runner)
    for kind in (QueueingExecutor, ThreadedExecutor):
        executor = kind(runner, 1)
        executor.close()
        del executor
    del runner
    gc.collect()
    assert forgotten() is None


@pytest.mark.slow
def test_padding_of_shapes_is_counted(shallow_model: Path) -> None:
    engine = make_engine(shallow_model, kv_blocks=96, block_size=4, itl_target_ms=0.0, kernels="triton")
    drive(engine, [make_submit(n, [60 + n] * 3, max_tokens=4, ignore_eos=True) for n in range(3)])
    # Nine tokens of prompts in a shape of 32, then three decodes of 3 in a shape of 4.
    assert engine.scheduler.stats.total.padding_tokens == 23 + 3
    assert engine.scheduler.stats.total.decode_tokens == 9


def test_a_row_whose_mask_leaves_nothing_gets_an_error(shallow_model: Path) -> None:
    settings = EngineSettings(str(shallow_model), dtype="float32", kernels="triton")
    model = load_model(shallow_model, dtype="float32", device=CPU, kernels="triton")
    runner = GpuRunner(model, settings, num_blocks=8)
    starts = [SequenceStart(n, [60], 1, [n], Sampling(4)) for n in range(2)]
    plan = StepPlan(1, [SequenceStep(n, 0, 0, 1, (), True) for n in range(2)], starts, masked=[1])
    runner.forward(plan)
    result = runner.sample(plan, {1: np.zeros((1, model.spec.vocab_size // 32), np.int32)})()
    assert result.errors == {1: NOTHING_LEFT}
    assert result.token_ids[0] is not None


def test_warming_up_reports_and_changes_nothing(shallow_model: Path) -> None:
    settings = EngineSettings(
        str(shallow_model), dtype="float32", max_step_tokens=4, max_running_requests=2, kernels="triton"
    )
    model = load_model(shallow_model, dtype="float32", device=CPU, kernels="triton")
    stages: list[str] = []

    def tokens(warm: bool) -> list[int | None]:
        runner = GpuRunner(model, settings, num_blocks=8)
        if warm:
            runner.warm_up(stages.append)
        start = SequenceStart(1, [60, 61, 62], 3, [0], Sampling(4))
        found: list[int | None] = []
        for at, count in ((0, 3), (3, 1), (4, 1)):
            plan = StepPlan(at, [SequenceStep(1, 0, at, count, (), True)], [start] if not at else [])
            found += runner.begin(plan)().token_ids
        return found

    assert tokens(warm=True) == tokens(warm=False)
    assert stages[-2] == "warming up, 3 of 3 step shapes"
    assert stages[-1] == "warming up sampling"
