"""An executor without a model that notices every wrong block: it keeps tokens where KV would be."""

import zlib

import numpy as np

from trunkline_worker.step.plan import NO_MASKS, Masks, PositionLogprobs, Sampling, StepPlan, StepResult

VOCAB = 50


class HistoryExecutor:
    """Writes each computed token into its slot of a paged store, then reads the whole history of each sequence back
    through its block table and compares it with what the sequence says it is. The next token is a hash of history,
    seed and length, so any mistake would also change everything that follows.
    """

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._store: list[int | None] = [None] * (num_blocks * block_size)
        self._rows: dict[int, tuple[list[int], list[int], int, Sampling]] = {}

    def forward(self, plan: StepPlan) -> None:
        for sequence_id in plan.ended:
            del self._rows[sequence_id]
        for start in plan.starts:
            assert start.sequence_id not in self._rows, "started twice"
            self._rows[start.sequence_id] = (
                list(start.token_ids),
                list(start.block_table),
                start.prompt_len,
                start.sampling,
            )
        for step in plan.steps:
            tokens, table, _, _ = self._rows[step.sequence_id]
            table += step.new_blocks
            end = step.num_computed + step.num_new
            assert step.num_new > 0
            assert step.samples == (end == len(tokens))
            for position in range(step.num_computed, end):
                self._store[self._slot(table, position)] = tokens[position]
        for step in plan.steps:
            tokens, table, _, _ = self._rows[step.sequence_id]
            end = step.num_computed + step.num_new
            history = [self._store[self._slot(table, position)] for position in range(end)]
            assert history == tokens[:end], f"sequence {step.sequence_id} reads another one's KV"

    def sample(self, plan: StepPlan, masks: Masks = NO_MASKS) -> StepResult:
        token_ids: list[int | None] = []
        prompt_logprobs: dict[int, list[PositionLogprobs]] = {}
        for index, step in enumerate(plan.steps):
            tokens, _, prompt_len, sampling = self._rows[step.sequence_id]
            if sampling.prompt_logprobs is not None and len(tokens) == prompt_len:
                first, end = step.num_computed + 1, min(step.num_computed + step.num_new + 1, prompt_len)
                prompt_logprobs[index] = [PositionLogprobs(tokens[p], 0.0, 1, []) for p in range(first, end)]
            if not step.samples or (index in plan.masked and index not in masks):
                token_ids.append(None)
                continue
            token_id = zlib.crc32(repr((tokens, sampling.seed)).encode()) % VOCAB
            if index in masks:
                allowed = np.flatnonzero(np.unpackbits(masks[index].view(np.uint8), count=VOCAB, bitorder="little"))
                token_id = int(allowed[token_id % len(allowed)])
            tokens.append(token_id)
            token_ids.append(token_id)
        return StepResult(plan.step_id, token_ids, {}, prompt_logprobs)

    def _slot(self, table: list[int], position: int) -> int:
        return table[position // self._block_size] * self._block_size + position % self._block_size
