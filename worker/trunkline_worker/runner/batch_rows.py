"""The state of each sequence that a runner keeps between steps."""

from collections.abc import Sequence
from copy import copy
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from trunkline_worker.step.plan import Sampling, SequenceStart, StepPlan


class SampledRow(Protocol):
    """The properties of a row that its sampling parameters depend on."""

    @property
    def sampling(self) -> Sampling: ...

    @property
    def num_output(self) -> int: ...


class Row:
    """One sequence's tokens and block table, in buffers that grow by doubling."""

    __slots__ = (
        "_blocks", "_tokens", "blocks_address", "forced", "mask", "num_blocks", "num_tokens", "prompt_len", "sampling",
    )  # fmt: skip

    def __init__(self, start: SequenceStart) -> None:
        self.sampling: Sampling = start.sampling
        self.mask: NDArray[np.int32] | None = None  # of the next token: see plan.Masks
        self.forced: int | None = None  # the next token, if it is not sampled
        self.prompt_len = start.prompt_len
        self.num_tokens = len(start.token_ids)
        self.num_blocks = len(start.block_table)
        self._tokens = np.empty(max(64, self.num_tokens * 2), np.int64)
        self._tokens[: self.num_tokens] = start.token_ids
        self._blocks = np.empty(max(16, self.num_blocks * 2), np.int64)
        self._blocks[: self.num_blocks] = start.block_table
        self.blocks_address: int = self._blocks.ctypes.data  # address of the buffer, for the C kernels

    @property
    def tokens(self) -> NDArray[np.int64]:
        return self._tokens[: self.num_tokens]

    @property
    def blocks(self) -> NDArray[np.int64]:
        return self._blocks[: self.num_blocks]

    def token(self, position: int) -> int:
        return int(self._tokens[position])

    def span(self, start: int, end: int) -> NDArray[np.int64]:
        """The tokens at positions [start, end), those of a run among them."""
        return self._tokens[start:end]

    @property
    def num_output(self) -> int:
        return self.num_tokens - self.prompt_len

    def at(self, position: int, forced: int | None = None) -> Self:
        """The row as it is when the token at a position is chosen. Like under(), only to be read."""
        row = copy(self)
        row.num_tokens, row.forced = position, forced
        return row

    def under(self, mask: NDArray[np.int32]) -> Self:
        """The row with a mask for its next token. It has the same buffers: it is only read, and only now."""
        row = copy(self)
        row.mask = mask
        return row

    def put_run(self, token_ids: Sequence[int]) -> None:
        """Writes the tokens of a run behind the row's own."""
        count = self.num_tokens + len(token_ids)
        while count > len(self._tokens):
            self._tokens = np.concatenate((self._tokens, np.empty_like(self._tokens)))
        self._tokens[self.num_tokens : count] = token_ids

    def append_tokens(self, token_ids: Sequence[int]) -> None:
        self.put_run(token_ids)
        self.num_tokens += len(token_ids)

    def append_token(self, token_id: int) -> None:
        if self.num_tokens == len(self._tokens):
            self._tokens = np.concatenate((self._tokens, np.empty_like(self._tokens)))
        self._tokens[self.num_tokens] = token_id
        self.num_tokens += 1

    def append_blocks(self, blocks: Sequence[int]) -> None:
        while self.num_blocks + len(blocks) > len(self._blocks):
            self._blocks = np.concatenate((self._blocks, np.empty_like(self._blocks)))
            self.blocks_address = self._blocks.ctypes.data
        self._blocks[self.num_blocks : self.num_blocks + len(blocks)] = blocks
        self.num_blocks += len(blocks)


class BatchRows:
    """Rows by sequence id. The deltas of the scheduler's plans keep them up to date."""

    def __init__(self) -> None:
        self._rows: dict[int, Row] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def apply(self, plan: StepPlan) -> list[Row]:
        """Applies a plan's changes, and returns the row of each of its steps. Asserts that plan and rows agree."""
        for sequence_id in plan.ended:
            del self._rows[sequence_id]
        for start in plan.starts:
            assert start.sequence_id not in self._rows, f"sequence {start.sequence_id} started twice"
            self._rows[start.sequence_id] = Row(start)
        rows, runs = [], plan.runs
        for index, step in enumerate(plan.steps):
            row = self._rows[step.sequence_id]
            if step.new_blocks:
                row.append_blocks(step.new_blocks)
            end = step.num_computed + step.num_new
            if runs and index in runs:
                end -= runs[index].num_new
                row.put_run(runs[index].token_ids)
            assert step.samples == (end == row.num_tokens), (
                f"sequence {step.sequence_id}: the plan computes up to {end}, the row has {row.num_tokens} tokens"
            )
            rows.append(row)
        return rows
