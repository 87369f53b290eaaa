"""The real engine of a model of vectors or scores, driven in process, with what a front makes of its values."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch

from tests.worker.engine_rig import Collected, drive
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.worker_pb2 import GetModelResponse, OutputKind, Submit, Task, Work
from trunkline_worker.engine.assembly import assemble
from trunkline_worker.engine.engine import Engine
from trunkline_worker.front.text.whole_output import finished
from trunkline_worker.settings import EngineSettings

LENGTHS = (1, 2, 17, 33, 5, 64, 120, 9, 200, 3)


def prompts_of(lengths: Sequence[int] = LENGTHS, *, vocab: int = 97, seed: int = 3) -> list[list[int]]:
    """Random tokens, without those that are special to a model."""
    draw = Random(seed)
    return [[draw.randrange(5, vocab) for _ in range(length)] for length in lengths]


class PooledEngine:
    """An engine on the CPU. Options are fields of EngineSettings."""

    def __init__(self, model: Path, **options: Any) -> None:
        settings = EngineSettings(model=str(model), **{"device": "cpu", **options})
        self.engine: Engine
        self.description: GetModelResponse
        self.engine, self.description, _ = assemble(settings, torch.device("cpu"), lambda stage: None, "")
        self._next_handle = 0

    def submit(self, prompt: Sequence[int], *, first_segment_tokens: int = 0, **work: Any) -> Submit:
        """A submit of the kind that the model computes, with a handle of its own."""
        self._next_handle += 1
        is_vector = self.description.task == Task.TASK_EMBED
        kind = OutputKind.OUTPUT_KIND_VECTOR if is_vector else OutputKind.OUTPUT_KIND_SCORE
        return Submit(
            handle=self._next_handle,
            prompt_token_ids=prompt,
            sampling=SamplingParams(seed=1, max_tokens=0),
            work=Work(output=kind, **work),
            first_segment_tokens=first_segment_tokens,
        )

    def outputs(self, prompts: Iterable[Sequence[int]], **work: Any) -> list[torch.Tensor]:
        """The outputs of prompts that are submitted together."""
        return self.run([self.submit(prompt, **work) for prompt in prompts])[0]

    def run(self, submits: Sequence[Submit]) -> tuple[list[torch.Tensor], Collected]:
        """The outputs of submits, and all that the engine told."""
        collected = drive(self.engine, submits)
        activation = self.description.pooling.activation
        found = []
        for submit in submits:
            (values,) = (output.values for output in collected.outputs[submit.handle] if output.values)
            found.append(torch.from_numpy(finished(list(values), submit.work, activation)))
        return found, collected
