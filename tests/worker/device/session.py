"""A runner on a device that is not there, driven as an engine drives it, with the device's rules checked."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tests.worker.device.cards import H200, Card
from tests.worker.device.device import FakeDevice
from tests.worker.device.faults import GraphFault
from tests.worker.device.models import inventions, model_of
from tests.worker.device.plans import RandomPlans
from trunkline_worker.model.architectures.decoder_spec import DecoderSpec
from trunkline_worker.runner.gpu.gpu_runner import GpuRunner
from trunkline_worker.runner.gpu.pooling_gpu_runner import PoolingGpuRunner
from trunkline_worker.runner.gpu.step_inputs import StepLayout, StepShape
from trunkline_worker.runner.sampler import NOT_FINITE
from trunkline_worker.settings import EngineSettings
from trunkline_worker.step.plan import RowError, StepPlan, StepResult


class Session:
    """A runner after its warm-up. Each replayed graph is compared with what its step would have launched."""

    def __init__(self, device: FakeDevice, runner: GpuRunner) -> None:
        self.device, self.runner = device, runner
        self.replays = 0
        self._programs = runner._programs
        self._replay = self._programs.run
        self._programs.run = self._run  # type: ignore[method-assign, assignment]

    def begin(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Puts a step on the queue, which must not wait for the device."""
        with self.device.launching():
            self.runner.forward(plan)
            finish = self.runner.sample(plan, {index: self._masks(plan, index) for index in plan.masked})

        def wait() -> StepResult:
            result = finish()
            self.device.check()
            check_result(plan, result)
            return result

        return wait

    def _masks(self, plan: StepPlan, index: int) -> NDArray[np.int32]:
        """Masks of an entry's samples, which may be any."""
        count = plan.runs[index].num_samples if index in plan.runs else 1
        return np.zeros((count, -(-self.runner._decoder.spec.vocab_size // 32)), np.int32)

    def _run(self, layout: StepLayout, shape: StepShape, rows: Tensor | None = None) -> object:
        graphs = self._programs._graphs
        known = shape in self._programs.shapes
        before = sum(graph.replays for graph in self.device.graphs)
        if known and shape in graphs:
            # What the step would launch without its graph, on the same tensors.
            self._programs._graphs = {}
            try:
                with self.device.recorded() as wanted:
                    self._replay(layout, shape)
            finally:
                self._programs._graphs = graphs
            captured = graphs[shape][0].recording  # type: ignore[attr-defined]
            captured.check_alive()
            captured.check_covers(wanted)
            self.replays += 1
        hidden = self._replay(layout, shape, rows)
        replayed = sum(graph.replays for graph in self.device.graphs) - before
        if replayed != int(known and bool(self.device.graphs)):
            raise GraphFault(f"{replayed} graphs were replayed for a step of {shape}")
        return hidden


def check_result(plan: StepPlan, result: StepResult) -> None:
    """Every entry got what it asked for, or the one error that made-up results may cause."""
    errors = {index: error for index, error in result.errors.items() if error != NOT_FINITE}
    assert not errors, next(iter(errors.values()), RowError("")).trace
    for index, step in enumerate(plan.steps):
        token = result.token_ids[index]
        is_made = token is not None or index in result.wholes
        if index in plan.runs:
            assert (index in result.runs) != (index in result.errors)
            continue
        assert is_made == (step.samples and index not in result.errors), f"entry {index} got {token}"
        assert token is None or token >= 0


@contextmanager
def session(
    spec: DecoderSpec,
    *,
    card: Card = H200,
    num_blocks: int = 3000,
    context_length: int = 4096,
    seed: int = 0,
    num_labels: int = 0,
    **options: object,
) -> Iterator[Session]:
    """A warmed-up runner. `options`: EngineSettings' fields; num_labels: of a model that scores; 0: it generates"""
    settings = EngineSettings("model", **options)  # type: ignore[arg-type]
    device = FakeDevice(card, inventions(spec.vocab_size, seed))
    with device.running():
        model = model_of(
            spec, deterministic=settings.deterministic, quantization=settings.quantization,
            kv_dtype=settings.kv_dtype, context_length=context_length, num_labels=num_labels,
        )  # fmt: skip
        kind = PoolingGpuRunner if num_labels else GpuRunner
        runner = kind(model, settings, num_blocks=num_blocks)
        runner.warm_up(lambda stage: None)
        shapes = runner._programs.shapes
        if settings.graphs != "off" and (len(device.graphs) != len(shapes) or len(set(shapes)) != len(shapes)):
            raise GraphFault(f"{len(device.graphs)} graphs were captured for {len(shapes)} shapes")
        yield Session(device, runner)


def plans_for(found: Session, settings: EngineSettings, num_blocks: int, context_length: int, seed: int) -> RandomPlans:
    """Plans within a session's limits."""
    return RandomPlans(
        seed, vocab_size=found.runner._decoder.spec.vocab_size, num_blocks=num_blocks,
        block_size=settings.block_size, context_length=min(context_length, num_blocks * settings.block_size),
        max_seqs=min(settings.max_running_requests, settings.max_step_tokens),
        max_step_tokens=settings.max_step_tokens,
    )  # fmt: skip


def drive(found: Session, plans: RandomPlans, count: int) -> None:
    """Steps of which each is begun before the one before is known, as on a GPU."""
    before: tuple[StepPlan, Callable[[], StepResult]] | None = None
    for _ in range(count):
        plan = plans.next()
        wait = found.begin(plan)
        if before is not None:
            result = before[1]()
            plans.failed([before[0].steps[index].sequence_id for index in result.errors])
            for index, tokens in result.runs.items():
                plans.took(before[0].steps[index].sequence_id, len(tokens))
        before = plan, wait
    if before is not None:
        before[1]()
