"""The StepRunner of the torch and C decoders: builds a step's batch, runs the decoder over it, samples."""

from collections.abc import Callable
from functools import partial
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from trunkline_kernels.ragged_batch import KVLayer, PagedBatch, RaggedBatch
from trunkline_worker.model.cpu_decoder import CpuDecoder
from trunkline_worker.model.decoder import Decoder
from trunkline_worker.model.expert_loads import imbalance
from trunkline_worker.model.loading import LoadedModel
from trunkline_worker.runner.batch_rows import BatchRows, Row
from trunkline_worker.runner.places import Places, late_entries
from trunkline_worker.runner.pool_copies import all_arrived, copy_blocks
from trunkline_worker.runner.sampler import (
    FAILURES,
    Sampled,
    is_plain_greedy,
    masks_of,
    position_logprobs,
    sample,
    sample_isolated,
)
from trunkline_worker.step.plan import (
    NO_MASKS,
    Masks,
    PositionLogprobs,
    RowError,
    SequenceStep,
    StepPlan,
    StepResult,
)

# Takes a plan and the rows of its steps. Returns hidden states [num_tokens, hidden], and the end of each step in them.
StepForward = Callable[[StepPlan, list[Row]], tuple[Tensor, list[int]]]
# Takes hidden states [num_rows, hidden] and their rows.
StepSample = Callable[[Tensor, list[Row]], Sampled]
# Prompt log-probabilities need logits at every position; computing this many rows at a time bounds their memory.
LOGPROB_ROWS = 128


def step_forward(model: LoadedModel, kv: list[KVLayer], block_size: int) -> StepForward:
    """Returns the forward pass for the model's decoder."""
    decoder = model.decoder
    if isinstance(decoder, CpuDecoder):
        return partial(_forward_with_c_kernels, decoder, kv, block_size)
    assert isinstance(decoder, Decoder), "the Triton kernels have a runner of their own"
    return partial(_forward_with_references, decoder, kv, block_size, model.device)


def _forward_with_c_kernels(
    decoder: CpuDecoder, kv: list[KVLayer], block_size: int, plan: StepPlan, rows: list[Row]
) -> tuple[Tensor, list[int]]:
    batch = build_paged_batch(plan.steps, rows, block_size)
    return decoder.forward(batch, kv, num_padding=plan.num_padding), _ends(plan)


def _forward_with_references(
    decoder: Decoder,
    kv: list[KVLayer],
    block_size: int,
    device: torch.device,
    plan: StepPlan,
    rows: list[Row],
) -> tuple[Tensor, list[int]]:
    token_ids, batch = build_batch(plan.steps, rows, block_size, device)
    return decoder.forward(token_ids, batch, kv, num_padding=plan.num_padding), _ends(plan)


def _ends(plan: StepPlan) -> list[int]:
    return list(accumulate(step.num_new for step in plan.steps))


def build_paged_batch(steps: list[SequenceStep], rows: list[Row], block_size: int) -> PagedBatch:
    """Returns the step's batch for the C kernels. It points into the rows, which outlive the step."""
    counts = [step.num_new for step in steps]
    if len(steps) == sum(counts):
        token_ids = np.array([row.token(step.num_computed) for step, row in zip(steps, rows, strict=True)], np.int64)
    else:
        token_ids = np.concatenate(
            [row.span(s.num_computed, s.num_computed + s.num_new) for s, row in zip(steps, rows, strict=True)]
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
    """Returns the step's token ids [num_tokens] int64, and its batch for the reference kernels."""
    block_tables = np.zeros((len(rows), max(row.num_blocks for row in rows)), np.int64)
    token_ids, positions, sequences = [], [], []
    for index, (step, row) in enumerate(zip(steps, rows, strict=True)):
        end = step.num_computed + step.num_new
        block_tables[index, : row.num_blocks] = row.blocks
        token_ids.append(row.span(step.num_computed, end))
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


def step_sample(model: LoadedModel) -> StepSample:
    """Returns the sampling function for the model's decoder."""
    decoder = model.decoder
    if isinstance(decoder, CpuDecoder):
        return partial(sample_isolated, decoder.logits, partial(_sample_with_c_kernels, decoder, model.deterministic))
    assert isinstance(decoder, Decoder), "the Triton kernels have a runner of their own"
    return partial(sample_isolated, decoder.logits, partial(_sample_on_the_host, model.deterministic))


def _sample_with_c_kernels(decoder: CpuDecoder, deterministic: bool, logits: Tensor, rows: list[Row]) -> Sampled:
    if not all(map(is_plain_greedy, rows)):
        return sample(logits.float(), rows, row_by_row=deterministic, exclude=decoder.exclude)
    ids = decoder.greedy(logits, masks_of(rows))
    return Sampled(
        [None if token_id < 0 else token_id for token_id in ids],
        errors={i: FAILURES[token_id] for i, token_id in enumerate(ids) if token_id < 0},
    )


def _sample_on_the_host(deterministic: bool, logits: Tensor, rows: list[Row]) -> Sampled:
    return sample(logits.cpu(), rows, row_by_row=deterministic)


class TorchRunner:
    """Runs steps with torch or the C kernels, as a step_thread.StepRunner. Owns the KV pool and the rows."""

    queues = False
    later_bytes = 0

    def __init__(self, model: LoadedModel, *, num_blocks: int, block_size: int) -> None:
        self._model = model
        self._block_size = block_size
        self._rows = BatchRows()
        self._pool = model.kv_pool(num_blocks, block_size)
        self._forward = step_forward(model, self._pool.layers, block_size)
        self._sample_rows = step_sample(model)
        self._hidden = torch.empty(0)  # [num_tokens, hidden] of the step in progress
        self._step_rows: list[Row] = []
        self._ends: list[int] = []  # end of each of the plan's steps in `_hidden`

    def begin(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Computes a step, and returns a function that returns its result."""
        self.forward(plan)
        return self.sample(plan, NO_MASKS)

    def forget(self, sequence_ids: list[int]) -> None:
        """Drops rows, as a plan's `ended` does, without a step."""
        self._rows.apply(StepPlan(0, [], ended=sequence_ids))

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> None:
        """Runs the model over the plan's tokens, and keeps their hidden states for sample()."""
        copy_blocks(self._pool, plan.copies)
        self._step_rows = rows = self._rows.apply(plan)
        if plan.steps:
            self._hidden, self._ends = self._forward(plan, rows)

    @torch.inference_mode()
    def sample(self, plan: StepPlan, masks: Masks) -> Callable[[], StepResult]:
        """Samples from the states of forward(), and appends the tokens to their rows. Returns a function that returns
        the result."""
        rows, ends = self._step_rows, self._ends
        prompt_logprobs: dict[int, list[PositionLogprobs]] = {}
        errors: dict[int, RowError] = {}
        for index, (step, row) in enumerate(zip(plan.steps, rows, strict=True)):
            if row.sampling.prompt_logprobs is not None and row.num_output == 0:
                found = self._prompt_logprobs(step, row, ends[index] - step.num_new)
                if isinstance(found, RowError):
                    errors[index] = found
                else:
                    prompt_logprobs[index] = found
        places = Places.of(plan, rows, late_entries(plan, masks))
        sampled = self._sample(plan, places, masks) if places.entries else Sampled([])
        result = places.result(plan, sampled.token_ids, sampled.logprobs, sampled.errors)
        result.prompt_logprobs = prompt_logprobs
        result.errors |= errors
        result.copies = all_arrived(plan.copies)
        loads = self._model.decoder.expert_loads.after_step(plan.num_tokens)
        if loads is not None:
            result.expert_imbalance = imbalance(loads.cpu())
        for index, token_id in zip(places.entries, sampled.token_ids, strict=True):
            if index not in plan.runs:
                # A token is appended even on failure: the next step may be planned before the failure is handled.
                rows[index].append_token(token_id or 0)
        for index, tokens in result.runs.items():
            rows[index].append_tokens(tokens)
        self._hidden = torch.empty(0)
        return lambda: result

    def _sample(self, plan: StepPlan, places: Places, masks: Masks) -> Sampled:
        """Samples at the places of a plan."""
        at = places.number(plan, np.array(self._ends, np.int32) - 1)
        found = [self._step_rows[index] for index in places.entries]
        if places.positions is not None:
            forced, positions = places.forced, places.positions
            found = [row.at(positions[i], forced.get(i)) for i, row in enumerate(found)]
        for i, mask in places.masks(masks).items() if masks else ():
            found[i] = found[i].under(mask)
        # If every token is sampled from, the states are in the plan's order.
        return self._sample_rows(
            self._hidden if len(at) == len(self._hidden) else self._hidden[torch.from_numpy(at)], found
        )

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
