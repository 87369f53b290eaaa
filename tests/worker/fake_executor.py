"""An executor without a model that notices every wrong block: it keeps tokens where KV would be."""

import zlib

import numpy as np
from numpy.typing import NDArray

from trunkline_worker.step.plan import NO_MASKS, CopyEnd, Masks, PositionLogprobs, Run, Sampling, StepPlan, StepResult

VOCAB = 50
NO_RUN = Run.of([])


class HistoryExecutor:
    """Writes each computed token into its slot of a paged store, then reads the whole history of each sequence back
    through its block table and compares it with what the sequence says it is. The next token is a hash of history,
    seed and length, so any mistake would also change everything that follows.
    """

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self.store: list[int | None] = [None] * (num_blocks * block_size)
        self._rows: dict[int, tuple[list[int], list[int], int, Sampling]] = {}

    def contents(self, block: int) -> list[int | None]:
        return self.store[block * self._block_size : (block + 1) * self._block_size]

    def write(self, block: int, contents: list[int | None]) -> None:
        self.store[block * self._block_size : (block + 1) * self._block_size] = contents

    def poison(self, block: int) -> None:
        """None is as NaN would be: no history has it."""
        self.write(block, [None] * self._block_size)

    def forward(self, plan: StepPlan) -> None:
        for copy in plan.copies:
            self.write(copy.target.block, self.contents(copy.source.block))
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
        for index, step in enumerate(plan.steps):
            tokens, table, _, _ = self._rows[step.sequence_id]
            table += step.new_blocks
            end = step.num_computed + step.num_new
            run = plan.runs.get(index, NO_RUN)
            assert step.num_new > run.num_new
            assert step.samples == (end == len(tokens) + run.num_new)
            for position in range(step.num_computed, end):
                self.store[self._slot(table, position)] = [*tokens, *run.token_ids][position]
        for index, step in enumerate(plan.steps):
            tokens, table, _, _ = self._rows[step.sequence_id]
            end = step.num_computed + step.num_new
            history = [self.store[self._slot(table, position)] for position in range(end)]
            known = [*tokens, *plan.runs.get(index, NO_RUN).token_ids]
            assert history == known[:end], f"sequence {step.sequence_id} reads another one's KV"

    def sample(self, plan: StepPlan, masks: Masks = NO_MASKS) -> StepResult:
        result = StepResult(plan.step_id, [None] * len(plan.steps))
        prompt_logprobs: dict[int, list[PositionLogprobs]] = {}
        for index, step in enumerate(plan.steps):
            tokens, _, prompt_len, sampling = self._rows[step.sequence_id]
            if sampling.prompt_logprobs is not None and len(tokens) == prompt_len:
                first, end = step.num_computed + 1, min(step.num_computed + step.num_new + 1, prompt_len)
                prompt_logprobs[index] = [PositionLogprobs(tokens[p], 0.0, 1, []) for p in range(first, end)]
            if not step.samples or (index in plan.masked and index not in masks):
                continue
            if not sampling.max_tokens:
                result.wholes[index] = self.whole(tokens)
                continue
            run = plan.runs.get(index, NO_RUN)
            last = tokens + list(run.token_ids[: run.num_new])
            allowed = masks.get(index, [None] * run.num_samples)
            sampled = [
                self.next_token(last[: len(last) - run.num_samples + 1 + at], sampling, mask)
                for at, mask in enumerate(allowed)
            ]
            taken = [token_id for token_id in run.taken(sampled) if token_id is not None]
            tokens += taken
            if index in plan.runs:
                result.runs[index] = taken
            else:
                (result.token_ids[index],) = taken
            if sampling.logprobs is not None:
                places = range(len(tokens) - len(taken), len(tokens))
                result.logprobs[index] = [PositionLogprobs(tokens[p], self.logprob(tokens, p), 1, []) for p in places]
        result.prompt_logprobs = prompt_logprobs
        result.copies = [CopyEnd(copy.copy_id, arrived=True) for copy in plan.copies]
        return result

    @staticmethod
    def next_token(tokens: list[int], sampling: Sampling, mask: NDArray[np.int32] | None = None) -> int:
        """The token that follows others."""
        token_id = zlib.crc32(repr((tokens, sampling.seed)).encode()) % VOCAB
        if mask is not None:
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), count=VOCAB, bitorder="little"))
            token_id = int(allowed[token_id % len(allowed)])
        return token_id

    @staticmethod
    def whole(tokens: list[int]) -> list[float]:
        """Stands for the vector of a prompt."""
        return [float(zlib.crc32(repr(tokens).encode())), float(len(tokens))]

    @staticmethod
    def logprob(tokens: list[int], position: int) -> float:
        """Stands for the log-probability of the token at a position."""
        return -float(zlib.crc32(repr(tokens[: position + 1]).encode()))

    def _slot(self, table: list[int], position: int) -> int:
        return table[position // self._block_size] * self._block_size + position % self._block_size
