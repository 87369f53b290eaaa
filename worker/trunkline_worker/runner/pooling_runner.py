"""The StepRunner of models whose output for a prompt is a vector or a score: hidden states are pooled, not sampled."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from trunkline_kernels.ragged_batch import KVPool
from trunkline_worker.model.cpu_decoder import CpuDecoder
from trunkline_worker.model.decoder import Decoder
from trunkline_worker.model.encoders.encoder import Encoder
from trunkline_worker.model.loading import LoadedModel
from trunkline_worker.model.pooling.pooling_head import PoolingHead
from trunkline_worker.runner.batch_rows import BatchRows, Row
from trunkline_worker.runner.pool_copies import all_arrived, copy_blocks
from trunkline_worker.runner.torch_runner import step_forward
from trunkline_worker.step.plan import NO_MASKS, Masks, RowError, StepPlan, StepResult

NOT_FINITE = RowError("the model computed values that are not finite numbers")


class States(Protocol):
    """Computes the hidden states of a step."""

    def of(self, plan: StepPlan, rows: list[Row]) -> Tensor:
        """[num_tokens, hidden], before final()"""

    def final(self, states: Tensor) -> Tensor:
        """What is pooled: [num_tokens, hidden]"""


@dataclass(frozen=True, slots=True)
class EncoderStates:
    """The states of an encoder. Each entry of a step is a whole prompt."""

    encoder: Encoder
    device: torch.device

    def of(self, plan: StepPlan, rows: list[Row]) -> Tensor:
        token_ids = np.concatenate([row.tokens for row in rows])
        segments = [row.sampling.first_segment_tokens for row in rows]
        return self.encoder.forward(
            torch.from_numpy(token_ids).to(self.device), [row.num_tokens for row in rows], segments
        )

    def final(self, states: Tensor) -> Tensor:
        return states


class DecoderStates:
    """The states of a decoder, which may compute a prompt in chunks, after a prefix from the cache."""

    def __init__(self, model: LoadedModel, pool: KVPool, block_size: int) -> None:
        decoder = model.decoder
        assert isinstance(decoder, CpuDecoder | Decoder), "the Triton kernels have a runner of their own"
        self._decoder, self._pool = decoder, pool
        self._forward = step_forward(model, pool.layers, block_size)

    def of(self, plan: StepPlan, rows: list[Row]) -> Tensor:
        copy_blocks(self._pool, plan.copies)
        return self._forward(plan, rows)[0]

    def final(self, states: Tensor) -> Tensor:
        return self._decoder.final_states(states)


def add_whole(result: StepResult, index: int, values: list[float]) -> None:
    """Adds the output of an entry to a step's result, or an error if it has none."""
    if all(map(math.isfinite, values)):
        result.wholes[index] = values
    else:
        result.errors[index] = NOT_FINITE


class PoolingRunner:
    """Runs steps as a step_thread.StepRunner. Owns the rows, and what is known of prompts that are partly computed."""

    queues = False
    later_bytes = 0

    def __init__(self, states: States, head: PoolingHead) -> None:
        self._states, self._head = states, head
        self._rows = BatchRows()
        self._pooled: dict[int, Tensor] = {}  # [hidden] of prompts that later steps continue, by sequence id

    def begin(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Computes a step, and returns a function that returns its result."""
        self.forward(plan)
        return self.sample(plan, NO_MASKS)

    def forget(self, sequence_ids: list[int]) -> None:
        """Drops rows, as a plan's `ended` does, without a step."""
        self._drop(sequence_ids)
        self._rows.apply(StepPlan(0, [], ended=sequence_ids))

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> None:
        """Runs the model over the plan's tokens, and pools their states."""
        self._drop(plan.ended)
        rows = self._rows.apply(plan)
        if not plan.steps:
            return
        states = self._states.of(plan, rows)
        ends = accumulate(step.num_new for step in plan.steps)
        for step, end in zip(plan.steps, ends, strict=True):
            if not self._head.needs_every_state and not step.samples:
                continue
            start = end - step.num_new if self._head.needs_every_state else end - 1
            known = self._pooled.get(step.sequence_id)
            self._pooled[step.sequence_id] = self._head.add(known, self._states.final(states[start:end]))

    @torch.inference_mode()
    def sample(self, plan: StepPlan, masks: Masks) -> Callable[[], StepResult]:
        """Makes the outputs of prompts that forward() has completed. Returns a function that returns the result."""
        result = StepResult(plan.step_id, [None] * len(plan.steps), copies=all_arrived(plan.copies))
        for index, step in enumerate(plan.steps):
            if not step.samples:
                continue
            values = self._head.values(self._pooled.pop(step.sequence_id), step.num_computed + step.num_new)
            add_whole(result, index, values)
        return lambda: result

    def _drop(self, sequence_ids: list[int]) -> None:
        for sequence_id in sequence_ids:
            self._pooled.pop(sequence_id, None)
