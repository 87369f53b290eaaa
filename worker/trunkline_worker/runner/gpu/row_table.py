"""Maps sequences to rows of the device, and keeps what the host needs of each row to plan steps."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from trunkline_kernels.gpu.device_rows import FLOAT_COLUMNS, SAMPLING_COLUMNS, DeviceRows, write_segments
from trunkline_worker.runner.gpu.transfers import to_device
from trunkline_worker.step.plan import RowError, Sampling, SequenceStart, StepPlan

_floats = attrgetter(*FLOAT_COLUMNS)


@dataclass(slots=True)
class TableRow:
    """One sequence's row. The host does not know the newest tokens, which are sampled on the device."""

    index: int  # of the row on the device
    serial: int  # unique per use of a row
    sampling: Sampling
    prompt_len: int
    prompt: list[int]  # if its log-probabilities are requested; else empty
    num_tokens: int
    num_blocks: int
    error: RowError | None = None  # raised by its parameters; the row is still computed, but gets no token

    @property
    def num_output(self) -> int:
        return self.num_tokens - self.prompt_len


class Segment(NamedTuple):
    """Numbers to write into a row of one of the tables, starting at column `first`."""

    row: int
    first: int
    data: Sequence[int] | NDArray[np.int32]


class RowTable:
    """Rows by sequence id, here and on the device. The deltas of the scheduler's plans keep them up to date."""

    def __init__(self, *, num_rows: int, max_tokens: int, max_blocks: int, device: torch.device) -> None:
        self.device_rows = DeviceRows.allocate(
            num_rows=num_rows, max_tokens=max_tokens, max_blocks=max_blocks, device=device
        )
        self.block_tables = np.zeros((num_rows, max_blocks), np.int32)  # as on the device
        self._device = device
        self._rows: dict[int, TableRow] = {}
        self._free = list(range(num_rows - 1, -1, -1))
        self._serial = 0

    def apply(self, plan: StepPlan) -> list[TableRow]:
        """Applies a plan's changes, and returns the row of each of its steps. Asserts that plan and rows agree."""
        for sequence_id in plan.ended:
            self._free.append(self._rows.pop(sequence_id).index)
        for start in plan.starts:
            assert start.sequence_id not in self._rows, f"sequence {start.sequence_id} started twice"
            self._rows[start.sequence_id] = self._start(start)
        rows, grown, written, runs = [], [], [], plan.runs
        for index, step in enumerate(plan.steps):
            row = self._rows[step.sequence_id]
            if step.new_blocks:
                grown.append(Segment(row.index, row.num_blocks, step.new_blocks))
                self.block_tables[row.index, row.num_blocks : row.num_blocks + len(step.new_blocks)] = step.new_blocks
                row.num_blocks += len(step.new_blocks)
            end = step.num_computed + step.num_new
            if runs and index in runs:
                end -= runs[index].num_new
                written.append(Segment(row.index, row.num_tokens, runs[index].token_ids))
            assert step.samples == (end == row.num_tokens), (
                f"sequence {step.sequence_id}: the plan computes up to {end}, the row has {row.num_tokens} tokens"
            )
            rows.append(row)
        self._send(plan, grown, written)
        return rows

    def _start(self, start: SequenceStart) -> TableRow:
        self._serial += 1
        index, num_blocks = self._free.pop(), len(start.block_table)
        self.block_tables[index, :num_blocks] = start.block_table
        wanted = start.sampling.prompt_logprobs is not None
        return TableRow(
            index,
            self._serial,
            start.sampling,
            start.prompt_len,
            start.token_ids[: start.prompt_len] if wanted else [],
            len(start.token_ids),
            num_blocks,
        )

    def _columns(self, row: TableRow) -> NDArray[np.int32]:
        """Returns the row's sampling columns. If its parameters raise an exception, that becomes the row's error, and
        the columns are greedy."""
        try:
            return sampling_columns(row)
        except Exception as error:  # one row's error must not fail the other rows' step
            row.error = RowError.of_bug(error)
            return sampling_columns(replace(row, sampling=Sampling(1, temperature=0.0)))

    def _send(self, plan: StepPlan, grown: list[Segment], written: list[Segment]) -> None:
        """Sends the changes to the device in one copy, and writes them with one kernel per table.

        grown: of the block tables; written: tokens of runs
        """
        starts = [(self._rows[start.sequence_id], start) for start in plan.starts]
        rows = self.device_rows
        changes = [
            (rows.tokens, [*(Segment(row.index, 0, start.token_ids) for row, start in starts), *written]),
            (rows.block_tables, [*(Segment(row.index, 0, start.block_table) for row, start in starts), *grown]),
            (rows.sampling, [Segment(row.index, 0, self._columns(row)) for row, _ in starts]),
        ]
        changes = [(target, segments) for target, segments in changes if segments]
        arrays: list[NDArray[np.int32]] = []
        for _, segments in changes:
            lens = np.array([len(segment.data) for segment in segments], np.int32)
            places = np.array([(segment.row, segment.first) for segment in segments], np.int32)
            arrays.append(np.column_stack([places, lens, np.cumsum(lens) - lens]).astype(np.int32))
            arrays.append(np.concatenate([np.asarray(segment.data, np.int32) for segment in segments]))
        if not arrays:
            return
        sent = iter(to_device(arrays, self._device))
        for target, segments in changes:
            write_segments(target, next(sent), next(sent), max(len(segment.data) for segment in segments))


def sampling_columns(row: TableRow) -> NDArray[np.int32]:
    """Returns the row's [SAMPLING_COLUMNS] int32 columns, in the order of trunkline_kernels.gpu.device_rows."""
    s = row.sampling
    floats = np.array(_floats(s), np.float32).view(np.int32)
    seed = np.array([s.seed], np.uint64).view(np.int32)
    top_k = min(s.top_k, np.iinfo(np.int32).max)
    columns = np.array([*floats, top_k, *seed, row.prompt_len], np.int32)
    assert len(columns) == SAMPLING_COLUMNS.value
    return columns
