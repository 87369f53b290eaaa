"""What the engine reports of the least work of its steps."""

from typing import NamedTuple

import pytest

from tests.worker.engine_rig import make_engine, make_submit
from trunkline.engine.v1.engine_pb2 import EngineRequest, EngineStep, StepRecord
from trunkline_bench.simulation.costs.step_work import work_of
from trunkline_worker.engine.engine import Engine
from trunkline_worker.step.plan import StepPlan

# The demo model, in float32: 4 bytes a parameter.
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB = 256, 4, 4, 2, 64, 640, 2048


class Ran(NamedTuple):
    plan: StepPlan
    record: StepRecord


def run(engine: Engine, *batches: list[list[int]]) -> list[Ran]:
    """Submits each batch of prompts after a step, and returns all steps."""
    plans: list[StepPlan] = []
    launch = engine.executor.launch

    def noted(plan: StepPlan) -> None:
        plans.append(plan)
        launch(plan)

    engine.executor.launch = noted  # type: ignore[method-assign]
    handles = iter(range(1, 100))
    waiting = list(batches)
    steps: list[EngineStep] = []
    while engine.has_work or waiting:
        if waiting:
            submits = [make_submit(next(handles), prompt, max_tokens=4) for prompt in waiting.pop(0)]
            engine.accept(EngineRequest(submits=submits))
        step = engine.step()
        if step is not None and step.HasField("record"):
            steps.append(step)
    return [Ran(plan, step.record) for plan, step in zip(plans, steps, strict=True)]


def test_a_step_with_a_prompt_and_decodes_has_exactly_its_work() -> None:
    ran = run(make_engine(itl_target_ms=0.0, peak_tflops=1e-3, peak_gb_per_s=1.0), [[5] * 20, [6] * 30], [[7] * 9])
    mixed = ran[1].record
    assert (mixed.decode_tokens, mixed.prefill_tokens) == (2, 9)
    matrices = LAYERS * (HIDDEN * HEAD_DIM * 2 * (HEADS + KV_HEADS) + 3 * HIDDEN * INTERMEDIATE)
    norms = LAYERS * 2 * HIDDEN
    head = HIDDEN * VOCAB
    contexts = 21 + 31 + 9
    kv_token = LAYERS * 2 * KV_HEADS * HEAD_DIM * 4
    assert mixed.least_bytes == 4 * (matrices + norms + head + HIDDEN) + kv_token * (contexts + 11)
    pairs = 21 + 31 + 9 * 10 / 2
    assert mixed.least_flops == 2 * matrices * 11 + 2 * head * 3 + LAYERS * 4 * HEADS * HEAD_DIM * pairs
    assert mixed.least_s == pytest.approx(max(mixed.least_bytes / 1e9, mixed.least_flops / 1e9))


def test_sums_of_the_budget_are_those_of_the_plan() -> None:
    engine = make_engine(max_step_tokens=16)
    ran = run(engine, [[5] * 20, [6] * 30], [[7] * 9, [8]], [[9] * 33], [[5] * 20])
    assert engine.scheduler.stats.prefix_hit_tokens, "a prompt was partly cached"
    assert any(step.samples and step.num_new > 1 for plan, _ in ran for step in plan.steps)
    floor = engine._floor
    assert floor is not None
    model = floor._work
    for plan, record in ran:
        work = work_of(plan)
        expected = model.step(work.num_tokens, work.num_sampled, model.attended(plan.steps))
        assert (record.least_bytes, record.least_flops) == expected
        assert not record.HasField("least_s"), "no peak rate of a CPU is known"
