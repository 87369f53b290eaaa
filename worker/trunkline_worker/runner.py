"""The executor that computes: builds a step's ragged batch, runs the decoder over it, samples."""

from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from trunkline_kernels.cpu.paged_batch import PagedBatch
from trunkline_kernels.ragged_batch import KVLayer, RaggedBatch, allocate_kv
from trunkline_worker.batch_rows import BatchRows, Row
from trunkline_worker.logprobs import position_logprobs
from trunkline_worker.model.cpu_decoder import CpuDecoder
from trunkline_worker.model.loading import LoadedModel
from trunkline_worker.plan import PositionLogprobs, SequenceStep, StepPlan, StepResult
from trunkline_worker.sampler import NOT_FINITE, Sampled, is_plain_greedy, sample

# Prompt log-probabilities need logits at every position; this many rows at a time bounds their memory.
LOGPROB_ROWS = 128


class TorchExecutor:
    """Owns the KV pool and the rows; see executor.Executor."""

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
            dtype=model.dtype,
            device=model.device,
        )
        self._hidden = torch.empty(0)  # [num_tokens, hidden] of the step in progress
        self._step_rows: list[Row] = []

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> None:
        self._step_rows = rows = self._rows.apply(plan)
        decoder = self._model.decoder
        if isinstance(decoder, CpuDecoder):
            paged = build_paged_batch(plan.steps, rows, self._block_size)
            self._hidden = decoder.forward(paged, self._kv, num_padding=plan.num_padding)
        else:
            token_ids, batch = build_batch(plan.steps, rows, self._block_size, self._model.device)
            self._hidden = decoder.forward(token_ids, batch, self._kv, num_padding=plan.num_padding)

    @torch.inference_mode()
    def sample(self, plan: StepPlan) -> StepResult:
        rows = self._step_rows
        ends = list(accumulate(step.num_new for step in plan.steps))
        prompt_logprobs = {
            index: self._prompt_logprobs(step, row, ends[index] - step.num_new)
            for index, (step, row) in enumerate(zip(plan.steps, rows, strict=True))
            if row.sampling.prompt_logprobs is not None and row.num_output == 0
        }
        sampling = [index for index, step in enumerate(plan.steps) if step.samples]
        token_ids: list[int | None] = [None] * len(plan.steps)
        sampled = Sampled([])
        if sampling:
            sampled = self._sample([rows[i] for i in sampling], [ends[index] - 1 for index in sampling])
            for index, token_id in zip(sampling, sampled.token_ids, strict=True):
                token_ids[index] = token_id
                if token_id is not None:
                    rows[index].append_token(token_id)
        self._hidden = torch.empty(0)
        return StepResult(
            plan.step_id,
            token_ids,
            {sampling[i]: entry for i, entry in sampled.logprobs.items()},
            prompt_logprobs,
            {sampling[i]: error for i, error in sampled.errors.items()},
        )

    def _sample(self, rows: list[Row], at: list[int]) -> Sampled:
        """The next token of each row, from the hidden states at these places."""
        hidden = self._hidden if len(at) == len(self._hidden) else self._hidden[at]
        decoder = self._model.decoder
        logits = decoder.logits(hidden)
        if isinstance(decoder, CpuDecoder) and all(map(is_plain_greedy, rows)):
            ids = decoder.greedy(logits)
            return Sampled(
                [None if token_id < 0 else token_id for token_id in ids],
                errors={i: NOT_FINITE for i, token_id in enumerate(ids) if token_id < 0},
            )
        # Everything else of sampling runs on the host, in float32.
        return sample(logits.float().cpu(), rows, row_by_row=self._model.deterministic)

    def _prompt_logprobs(self, step: SequenceStep, row: Row, first_row: int) -> list[PositionLogprobs]:
        """The state at position p predicts the prompt's token p + 1."""
        count = min(step.num_new, row.prompt_len - 1 - step.num_computed)
        found: list[PositionLogprobs] = []
        for start in range(0, count, LOGPROB_ROWS):
            size = min(LOGPROB_ROWS, count - start)
            logits = self._model.decoder.logits(self._hidden[first_row + start : first_row + start + size])
            logits = logits.float().cpu()
            after = step.num_computed + start + 1
            targets: list[int] = row.tokens[after : after + size].tolist()
            found += position_logprobs(logits, targets, [row.sampling.prompt_logprobs or 0] * size)
        return found


def build_paged_batch(steps: list[SequenceStep], rows: list[Row], block_size: int) -> PagedBatch:
    """The step as the C kernels read it. It points into the rows, which outlive the step."""
    counts = [step.num_new for step in steps]
    if len(steps) == sum(counts):
        token_ids = np.array([row.token(step.num_computed) for step, row in zip(steps, rows, strict=True)], np.int64)
    else:
        token_ids = np.concatenate(
            [row.tokens[s.num_computed : s.num_computed + s.num_new] for s, row in zip(steps, rows, strict=True)]
        )
    return PagedBatch(
        token_ids=torch.from_numpy(token_ids),
        starts=torch.from_numpy(np.cumsum([0, *counts], dtype=np.int64)),
        contexts=torch.from_numpy(np.array([step.num_computed + step.num_new for step in steps], np.int64)),
        tables=torch.from_numpy(np.array([row.blocks_address for row in rows], np.int64)),
        block_size=block_size,
    )


def build_batch(
    steps: list[SequenceStep], rows: list[Row], block_size: int, device: torch.device
) -> tuple[Tensor, RaggedBatch]:
    """The step's token ids [num_tokens] and where they go."""
    block_tables = np.zeros((len(rows), max(row.num_blocks for row in rows)), np.int64)
    token_ids, positions, sequences = [], [], []
    for index, (step, row) in enumerate(zip(steps, rows, strict=True)):
        end = step.num_computed + step.num_new
        block_tables[index, : row.num_blocks] = row.blocks
        token_ids.append(row.tokens[step.num_computed : end])
        positions.append(np.arange(step.num_computed, end))
        sequences.append(np.full(step.num_new, index))
    where = np.concatenate(positions)
    slots = block_tables[np.concatenate(sequences), where // block_size] * block_size + where % block_size
    batch = RaggedBatch(
        positions=torch.from_numpy(where).to(device),
        slots=torch.from_numpy(slots).to(device),
        query_lens=[step.num_new for step in steps],
        context_lens=[step.num_computed + step.num_new for step in steps],
        block_tables=torch.from_numpy(block_tables),
        block_size=block_size,
    )
    return torch.from_numpy(np.concatenate(token_ids)).to(device), batch
