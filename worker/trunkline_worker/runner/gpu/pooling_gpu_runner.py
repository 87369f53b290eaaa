"""The StepRunner of a GPU for decoders whose output is made of the state of a prompt's last token."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from trunkline_worker.model.loading import LoadedModel
from trunkline_worker.runner.gpu.gpu_runner import REHEARSAL, GpuRunner
from trunkline_worker.runner.gpu.transfers import Arriving
from trunkline_worker.runner.pool_copies import all_arrived
from trunkline_worker.runner.pooling_runner import add_whole
from trunkline_worker.settings import EngineSettings
from trunkline_worker.step.plan import Masks, Sampling, SequenceStart, SequenceStep, StepPlan, StepResult

NO_TOKENS = Sampling(max_tokens=0)


class PoolingGpuRunner(GpuRunner):
    """Runs steps with the Triton kernels. It makes outputs where GpuRunner samples tokens."""

    def __init__(self, model: LoadedModel, settings: EngineSettings, *, num_blocks: int) -> None:
        super().__init__(model, settings, num_blocks=num_blocks)
        assert model.head is not None, "this runner is for models of vectors and scores"
        self._head = model.head

    def _rehearse(self) -> None:
        """Runs one prompt, so that no request waits for kernels to compile."""
        start = SequenceStart(REHEARSAL, [0, 0], 2, [0], NO_TOKENS)
        self.begin(StepPlan(0, [SequenceStep(REHEARSAL, 0, 0, 2, (), True)], [start]))()
        self.forget([REHEARSAL])

    @torch.inference_mode()
    def sample(self, plan: StepPlan, masks: Masks) -> Callable[[], StepResult]:
        """Puts the heads of prompts that end in the step on the device's queue. Returns a function that waits for the
        result."""
        assert self._forwarded is not None, "forward() comes first"
        _, started_s, start, num_padding, _, places, _, sampled = self._forwarded
        self._forwarded = None
        tensors = []
        if places.entries:
            states = self._decoder.final_states(sampled[: len(places.entries)])
            tensors = [torch.stack([self._head.projected(state.float()) for state in states])]
        arriving = self._from_device.send(tensors)
        return PendingOutputs(plan, places.entries, arriving, started_s, start, num_padding).result


@dataclass(slots=True)
class PendingOutputs:
    """A step on the device's queue."""

    plan: StepPlan
    entries: list[int]  # of the plan, that have outputs
    arriving: Arriving
    started_s: float
    start: "torch.cuda.Event | None"  # None: on a CPU
    num_padding: int

    def result(self) -> StepResult:
        """Waits for the outputs, and returns them as a StepResult."""
        device_time_s = time.perf_counter() - self.started_s
        tensors = self.arriving.wait()
        result = StepResult(self.plan.step_id, [None] * len(self.plan.steps), copies=all_arrived(self.plan.copies))
        for index, values in zip(self.entries, tensors[0].tolist() if self.entries else [], strict=True):
            add_whole(result, index, values)
        result.device_time_s = device_time_s if self.start is None else self.arriving.seconds_since(self.start)
        result.num_padding = self.num_padding
        return result
