"""The StepRunner of a GPU. begin() returns before the step is computed, and the next step may begin: all that it needs
of this one is on the device.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from trunkline.sampling_params import EXAMPLES
from trunkline_kernels.gpu.device_rows import gather_rows
from trunkline_kernels.gpu.logprobs import logprobs
from trunkline_kernels.gpu.ragged_attention import Pieces
from trunkline_worker.model.expert_loads import imbalance
from trunkline_worker.model.gpu_decoder import GpuDecoder
from trunkline_worker.model.loading import LoadedModel
from trunkline_worker.runner.gpu.prefix_groups import FEWEST_SEQUENCES, PrefixGroups
from trunkline_worker.runner.gpu.row_table import RowTable, TableRow
from trunkline_worker.runner.gpu.step_inputs import StepInputs, StepLayout, StepLayouts, StepShape
from trunkline_worker.runner.gpu.step_programs import StepPrograms, mixed_sizes
from trunkline_worker.runner.gpu.step_sampling import StepSamples, logprob_entries, sample_step
from trunkline_worker.runner.gpu.transfers import Arriving, FromDevice, to_device
from trunkline_worker.runner.places import Places, late_entries
from trunkline_worker.runner.pool_copies import all_arrived, copy_blocks
from trunkline_worker.runner.sampler import FAILURES
from trunkline_worker.settings import EngineSettings
from trunkline_worker.step.plan import (
    NO_MASKS,
    Masks,
    PositionLogprobs,
    RowError,
    Sampling,
    SequenceStart,
    SequenceStep,
    StepPlan,
    StepResult,
)

# Prompt log-probabilities need logits at every position; computing this many rows at a time bounds their memory.
LOGPROB_ROWS = 128
GRAPH_BYTES = 12 << 20  # allowance for each graph
GRAPH_POOL_BYTES = 512 << 20  # allowance for the memory that the graphs share
NUM_COLUMNS = 5  # of log-probabilities: see logprobs()
REHEARSAL = -1  # sequence id of the rehearsal; no real sequence has it


class GpuRunner:
    """Runs steps with the Triton kernels, as a step_thread.StepRunner. Owns the KV pool and the rows."""

    def __init__(self, model: LoadedModel, settings: EngineSettings, *, num_blocks: int) -> None:
        decoder = model.decoder
        assert isinstance(decoder, GpuDecoder), "this runner is for the Triton kernels"
        self._decoder, self._device, self._dtype = decoder, model.device, model.dtype
        spec, size = model.spec, settings.block_size
        max_seqs = min(settings.max_running_requests, settings.max_step_tokens)
        max_tokens = min(model.context_length, num_blocks * size)
        self._pool = model.kv_pool(num_blocks, size)
        self._table = RowTable(
            num_rows=max_seqs, max_tokens=max_tokens, max_blocks=-(-max_tokens // size), device=model.device
        )
        # Enough programs to fill the device several times. More would only add results to merge.
        programs = -(-4 * decoder.chip.num_multiprocessors // spec.num_kv_heads)
        prefix_tiles = programs + -(-max_seqs // decoder.tile_seqs)
        # Contexts may share blocks, so their total length may exceed the pool.
        most_pieces = max_seqs * -(-model.context_length // decoder.split) if decoder.split else 0
        max_pieces = min(max_seqs + 4 * num_blocks * size // decoder.split, most_pieces) if decoder.split else 0
        captures = model.device.type == "cuda" and settings.graphs != "off"
        self._layouts = StepLayouts(
            decoder, PrefixGroups(self._table.block_tables, size), prefix_tiles,
            most_graph_tokens=mixed_sizes(settings.max_step_tokens, capture=captures)[-1],
        )  # fmt: skip
        # Ended rows of a padded batch are computed in addition to a whole step's tokens.
        inputs = StepInputs(
            decoder, self._table, block_size=size, max_tokens=settings.max_step_tokens + max_seqs,
            max_seqs=max_seqs, max_pieces=max_pieces, max_prefix_tiles=prefix_tiles,
        )  # fmt: skip
        # The largest possible step. Steps that no captured shape holds are at most this large.
        cut = max_seqs * -(-max_tokens // decoder.split) if decoder.split else 0
        tiles = 2 * max_seqs + -(-settings.max_step_tokens // decoder.tile_seqs) + cut
        inputs.reserve(StepShape(settings.max_step_tokens, max_seqs, max_seqs, tiles, max_seqs, prefix_tiles, max_seqs))
        self._programs = StepPrograms(
            decoder, self._pool.layers, inputs, max_seqs=max_seqs, max_tokens=settings.max_step_tokens,
            max_pieces=max_pieces, prefix_tiles=prefix_tiles if self._layouts.shares else 0,
            fewest_sharing=FEWEST_SEQUENCES, capture=captures, compiles=model.device.type == "cuda",
        )  # fmt: skip
        self._from_device = FromDevice(model.device)
        self._forwarded: Forwarded | None = None
        self.queues = model.device.type == "cuda"
        # A step with more pieces than max_pieces gets additional room of its own.
        self.later_bytes = 2 * Pieces.num_bytes(most_pieces, spec.num_heads, spec.head_dim)
        if captures:
            self.later_bytes += len(self._programs.shapes) * GRAPH_BYTES + GRAPH_POOL_BYTES + decoder.widened_bytes

    @torch.inference_mode()
    def warm_up(self, report: Callable[[str], None]) -> None:
        """Compiles kernels and captures graphs. Call it once before the first step; without it the first steps are
        slow."""
        self._programs.warm_up(report)
        for bit in range(LOGPROB_ROWS.bit_length()):  # a product's tiles may depend on the power of two
            size = 1 << bit, self._decoder.spec.hidden_size
            self._decoder.logits(torch.zeros(size, dtype=self._dtype, device=self._device))
        report("warming up sampling")
        self._rehearse()

    def _rehearse(self) -> None:
        """Runs a sequence that uses every sampling parameter, and a mask, so that no request waits for kernels to
        compile. It writes to the first block, which no sequence uses yet."""
        everything = Sampling(max_tokens=2, logit_bias=((0, 1.0),), logprobs=1, prompt_logprobs=1, **EXAMPLES)
        start = SequenceStart(REHEARSAL, [0, 0], 2, [0], everything)
        self.begin(StepPlan(0, [SequenceStep(REHEARSAL, 0, 0, 2, (), True)], [start]))()
        masked = StepPlan(0, [SequenceStep(REHEARSAL, 0, 2, 1, (), True)], masked=[0])
        self.forward(masked)
        self.sample(masked, {0: np.full((1, -(-self._decoder.spec.vocab_size // 32)), -1, np.int32)})()
        self.forget([REHEARSAL])

    def forget(self, sequence_ids: list[int]) -> None:
        """Drops rows, as a plan's `ended` does, without a step."""
        self._table.apply(StepPlan(0, [], ended=sequence_ids))

    def begin(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Puts a step on the device's queue. Returns a function that waits for its result."""
        self.forward(plan)
        return self.sample(plan, NO_MASKS)

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> None:
        """Puts the first part of a step on the device's queue. sample() must follow before the next step."""
        started_s = time.perf_counter()
        copy_blocks(self._pool, plan.copies)
        rows = self._table.apply(plan)
        if not plan.steps:
            none, event = torch.empty(0), self._from_device.event()
            self._forwarded = Forwarded(rows, started_s, event, 0, np.zeros(0, np.int32), Places([]), none, none)
            return
        layout = self._layouts.lay_out(plan.steps, rows)
        shape = self._programs.send(layout, plan.num_padding)
        num_padding = shape.num_tokens - layout.num_tokens - plan.num_padding  # what the shape adds
        start = self._from_device.event()
        last = layout.last_tokens()
        places = Places.of(plan, rows)
        # Prompt log-probabilities need the states of all tokens; other steps compute only the sampled tokens' states.
        whole = any(row.sampling.prompt_logprobs is not None and row.num_output == 0 for row in rows)
        hidden, sampled = self._hidden(layout, shape, places.number(plan, last), whole)
        self._forwarded = Forwarded(rows, started_s, start, num_padding, last, places, hidden, sampled)

    @torch.inference_mode()
    def sample(self, plan: StepPlan, masks: Masks) -> Callable[[], StepResult]:
        """Puts the second part of a step on the device's queue. Returns a function that waits for its result."""
        assert self._forwarded is not None, "forward() comes first"
        rows, started_s, start, num_padding, last, places, hidden, sampled = self._forwarded
        self._forwarded = None
        prompts = {
            index: self._prompt_logprobs(hidden, step, row, int(last[index]) - step.num_new + 1)
            for index, (step, row) in enumerate(zip(plan.steps, rows, strict=True))
            if row.sampling.prompt_logprobs is not None and row.num_output == 0
        }
        late = late_entries(plan, masks)
        if late:
            (kept,) = to_device(
                [np.flatnonzero([i not in late for i in places.entries]).astype(np.int32)], self._device
            )
            sampled, places = gather_rows(sampled, kept), Places.of(plan, rows, late)
        samples: StepSamples | None = None
        if places.entries:
            found = [rows[index] for index in places.entries]
            if places.positions is not None:
                found = [
                    replace(row, num_tokens=position) if index in plan.runs else row
                    for index, row, position in zip(places.entries, found, places.positions, strict=True)
                ]
            logits = self._decoder.logits(sampled)
            samples = sample_step(
                logits, found, self._table.device_rows, forced=places.forced,
                masks=places.masks(masks) if masks else {},
            )  # fmt: skip
            for index, row in zip(places.entries, found, strict=True) if places.positions is not None else ():
                rows[index].error = rows[index].error or row.error
        tensors = [samples.tokens, *samples.logprobs] if samples else []
        tensors += [column for columns in prompts.values() for column in columns]
        loads = self._decoder.expert_loads.after_step(plan.num_tokens)
        arriving = self._from_device.send(tensors if loads is None else [*tensors, loads])
        asking = samples.asking if samples else []
        return PendingStep(
            plan,
            rows,
            places,
            arriving,
            started_s=started_s,
            start=start,
            num_padding=num_padding,
            asking=asking,
            num_top=[rows[places.entries[i]].sampling.logprobs or 0 for i in asking],
            prompts={i: (len(columns), rows[i].sampling.prompt_logprobs or 0) for i, columns in prompts.items()},
            errors={index: row.error for index, row in enumerate(rows) if row.error is not None},
            has_loads=loads is not None,
        ).result

    def _hidden(
        self, layout: StepLayout, shape: StepShape, wanted: NDArray[np.int32], whole: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the model. Returns hidden states [num_tokens, hidden] and those of the `wanted` tokens [num_wanted,
        hidden]; the first holds all tokens if `whole`, else it may hold the wanted ones only."""
        if np.array_equal(wanted, np.arange(len(wanted))) and (whole or layout.num_tokens == len(wanted)):
            hidden = self._programs.run(layout, shape)
            return hidden, hidden[: len(wanted)]
        (where,) = to_device([wanted], self._device)
        if whole:
            hidden = self._programs.run(layout, shape)
            return hidden, gather_rows(hidden, where)
        hidden = self._programs.run(layout, shape, where)
        return hidden, hidden

    def _prompt_logprobs(
        self, hidden: torch.Tensor, step: SequenceStep, row: TableRow, first_row: int
    ) -> list[torch.Tensor]:
        """Returns five columns for each part of LOGPROB_ROWS positions, on the device: token ids, then those of
        logprobs(). The state at position p predicts the prompt's token p + 1."""
        count = min(step.num_new, row.prompt_len - 1 - step.num_computed)
        columns: list[torch.Tensor] = []
        for start in range(0, count, LOGPROB_ROWS):
            size = min(LOGPROB_ROWS, count - start)
            logits = self._decoder.logits(hidden[first_row + start : first_row + start + size])
            after = step.num_computed + start + 1
            (targets,) = to_device([np.array(row.prompt[after : after + size], np.int64)], self._device)
            most = min(row.sampling.prompt_logprobs or 0, logits.shape[1])
            columns += [targets, *logprobs(logits, targets, most)]
        return columns


class Forwarded(NamedTuple):
    """A step whose forward pass is on the device's queue, and what its second part needs of it."""

    rows: list[TableRow]  # of the plan's steps
    started_s: float
    start: "torch.cuda.Event | None"  # None: on a CPU
    num_padding: int
    last: NDArray[np.int32]  # [num_steps] index of each step's last token
    places: Places  # those of late masks among them
    hidden: torch.Tensor  # see GpuRunner._hidden
    sampled: torch.Tensor  # [num_places, hidden]


@dataclass(slots=True)
class PendingStep:
    """A step on the device's queue, and what the tensors that it sends to the host are. Indices are the plan's."""

    plan: StepPlan
    rows: list[TableRow]
    places: Places
    # Sampled tokens if any step samples; the columns of their log-probabilities if any are requested; the columns of
    # prompt log-probabilities; the loads of experts if a window of them ends.
    arriving: Arriving
    started_s: float
    start: "torch.cuda.Event | None"  # None: on a CPU
    num_padding: int
    asking: list[int]  # indices of the samples whose log-probabilities are requested
    num_top: list[int]  # for each of these, how many likeliest tokens
    prompts: dict[int, tuple[int, int]]  # steps with prompt log-probabilities: number of columns, of likeliest tokens
    errors: dict[int, RowError]  # known before the step
    has_loads: bool

    def result(self) -> StepResult:
        """Waits for the tensors, and returns them as a StepResult."""
        device_time_s = time.perf_counter() - self.started_s
        tensors = iter(self.arriving.wait())
        found: list[int] = next(tensors).tolist() if self.places.entries else []
        logprobs: dict[int, PositionLogprobs] = {}
        if self.asking:
            columns = list(islice(tensors, NUM_COLUMNS))
            logprobs = dict(zip(self.asking, logprob_entries(columns, self.num_top), strict=True))
        failed = {i: FAILURES[token_id] for i, token_id in enumerate(found) if token_id < 0}
        tokens: Sequence[int | None] = found
        if failed or self.places.forced:
            tokens = [None if i in failed else self.places.forced.get(i, token) for i, token in enumerate(found)]
        result = self.places.result(self.plan, tokens, logprobs, failed)
        result.errors |= self.errors
        result.copies = all_arrived(self.plan.copies)
        for index, taken in result.runs.items():
            self.rows[index].num_tokens += len(taken)  # no step of this sequence is planned before
        for index, (num_columns, num_top) in self.prompts.items():
            entries = result.prompt_logprobs[index] = []
            for _ in range(num_columns // NUM_COLUMNS):
                columns = list(islice(tensors, NUM_COLUMNS))
                entries += logprob_entries(columns, [num_top] * len(columns[0]))
        if self.has_loads:
            result.expert_imbalance = imbalance(next(tensors))
        result.device_time_s = device_time_s if self.start is None else self.arriving.seconds_since(self.start)
        result.num_padding = self.num_padding
        return result
