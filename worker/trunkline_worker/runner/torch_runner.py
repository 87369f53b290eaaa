"""The StepRunner of the torch and C decoders: builds a step's batch, runs the decoder over it, samples."""

from collections.abc import Callable

import torch

from trunkline_kernels.ragged_batch import KVLayer, allocate_kv
from trunkline_worker.model.loading import LoadedModel
from trunkline_worker.runner.batch_rows import BatchRows, Row
from trunkline_worker.runner.logprobs import position_logprobs
from trunkline_worker.runner.sampler import Sampled
from trunkline_worker.runner.step_forward import step_forward
from trunkline_worker.runner.step_sample import step_sample
from trunkline_worker.step.plan import PositionLogprobs, RowError, SequenceStep, StepPlan, StepResult

# Prompt log-probabilities need logits at every position; computing this many rows at a time bounds their memory.
LOGPROB_ROWS = 128


class TorchRunner:
    """Runs steps with torch or the C kernels, as a step_thread.StepRunner. Owns the KV pool and the rows."""

    queues = False
    later_bytes = 0

    def __init__(self, model: LoadedModel, *, num_blocks: int, block_size: int) -> None:
        self._model = model
        self._block_size = block_size
        self._rows = BatchRows()
        spec = model.spec
        self._kv: list[KVLayer] = allocate_kv(
            num_layers=spec.num_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=model.kv_dtype,
            device=model.device,
        )
        self._forward = step_forward(model, self._kv, block_size)
        self._sample_rows = step_sample(model)
        self._hidden = torch.empty(0)  # [num_tokens, hidden] of the step in progress
        self._step_rows: list[Row] = []
        self._ends: list[int] = []  # end of each of the plan's steps in `_hidden`

    def begin(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Computes a step, and returns a function that returns its result."""
        self.forward(plan)
        result = self.sample(plan)
        return lambda: result

    def forget(self, sequence_ids: list[int]) -> None:
        """Drops rows, as a plan's `ended` does, without a step."""
        self._rows.apply(StepPlan(0, [], ended=sequence_ids))

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> None:
        """Runs the model over the plan's tokens, and keeps their hidden states for sample()."""
        self._step_rows = rows = self._rows.apply(plan)
        self._hidden, self._ends = self._forward(plan, rows)

    @torch.inference_mode()
    def sample(self, plan: StepPlan) -> StepResult:
        """Samples from the states of forward(), and appends the tokens to their rows."""
        rows = self._step_rows
        ends = self._ends
        prompt_logprobs: dict[int, list[PositionLogprobs]] = {}
        errors: dict[int, RowError] = {}
        for index, (step, row) in enumerate(zip(plan.steps, rows, strict=True)):
            if row.sampling.prompt_logprobs is not None and row.num_output == 0:
                found = self._prompt_logprobs(step, row, ends[index] - step.num_new)
                if isinstance(found, RowError):
                    errors[index] = found
                else:
                    prompt_logprobs[index] = found
        sampling = [index for index, step in enumerate(plan.steps) if step.samples]
        token_ids: list[int | None] = [None] * len(plan.steps)
        sampled = Sampled([])
        if sampling:
            sampled = self._sample([rows[i] for i in sampling], [ends[index] - 1 for index in sampling])
            for index, token_id in zip(sampling, sampled.token_ids, strict=True):
                token_ids[index] = token_id
                # A token is appended even on failure: the next step may be planned before the failure is handled.
                rows[index].append_token(token_id or 0)
        self._hidden = torch.empty(0)
        return StepResult(
            plan.step_id,
            token_ids,
            {sampling[i]: entry for i, entry in sampled.logprobs.items()},
            prompt_logprobs,
            {sampling[i]: error for i, error in sampled.errors.items()} | errors,
        )

    def _sample(self, rows: list[Row], at: list[int]) -> Sampled:
        """Samples the next token of each row from the hidden states at the indices `at`."""
        # If every token is sampled from, all steps are decodes, and the states are in the plan's order.
        return self._sample_rows(self._hidden if len(at) == len(self._hidden) else self._hidden[at], rows)

    def _prompt_logprobs(self, step: SequenceStep, row: Row, first_row: int) -> list[PositionLogprobs] | RowError:
        """Returns the log-probabilities of prompt tokens. The state at position p predicts the prompt's token p + 1."""
        count = min(step.num_new, row.prompt_len - 1 - step.num_computed)
        found: list[PositionLogprobs] = []
        for start in range(0, count, LOGPROB_ROWS):
            size = min(LOGPROB_ROWS, count - start)
            logits = self._model.decoder.logits(self._hidden[first_row + start : first_row + start + size])
            after = step.num_computed + start + 1
            try:
                targets: list[int] = row.tokens[after : after + size].tolist()
                found += position_logprobs(logits.float().cpu(), targets, [row.sampling.prompt_logprobs or 0] * size)
            except Exception as error:  # one row's error must not fail the other rows' step
                return RowError.of_bug(error)
        return found
