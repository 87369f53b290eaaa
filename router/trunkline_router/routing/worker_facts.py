"""What the policy reads of a worker, as numbers that lie side by side for a whole fleet."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from struct import Struct
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

Column = NDArray[np.float64]  # [num_workers]
Number = TypeVar("Number", float, Column)  # of one worker, or of all of them


class WorkerFacts(NamedTuple, Generic[Number]):
    """One worker, all floats: they travel as one row of a table. Or all workers, all columns of that table."""

    # What a step takes, see StepCostModel; not a number where the worker has not said
    fixed_s: Number
    token_s: Number
    kv_token_s: Number
    pair_s: Number
    step_tokens: Number  # most in a step
    lower_step_tokens: Number  # most of the lower lanes
    step_target_s: Number  # a step with chunks of prompts stays under it; infinite: no target
    # Uncached tokens of prompts before a request of each lane: of its lane and those above
    queued_interactive: Number
    queued_standard: Number
    queued_batch: Number
    waiting_tokens: Number  # of prompts that have no blocks yet, whatever their lane
    queued_context: Number  # (query, key) pairs of such a token, about
    choices: Number  # running and waiting
    most_running: Number  # choices
    decode_kv_tokens: Number  # context lengths of those that run or soon will, summed
    block_size: Number
    live_blocks: Number
    available_blocks: Number  # free, or cached and nothing else
    total_blocks: Number  # 0: not said
    # When what waits in a lane and those above will have been admitted; 0: nothing waits
    admission_interactive_s: Number
    admission_standard_s: Number
    admission_batch_s: Number
    slow_start_share: Number  # in (0, 1]
    by_load: Number  # 1: its cache is not counted on
    name_hash: Number  # of 53 bits


ROW = Struct(f"<{len(WorkerFacts._fields)}d")


@dataclass(frozen=True)
class WorkerTable:
    """The workers among which one is chosen, one per place in every sequence. A few are read row by row, many column by
    column."""

    worker_ids: Sequence[str]
    matched_tokens: Sequence[float] | Column  # leading tokens of the prompt that each one's cache holds
    packed: Sequence[bytes]  # rows

    def row(self, place: int) -> WorkerFacts[float]:
        return WorkerFacts(*ROW.unpack(self.packed[place]))

    @cached_property
    def rows(self) -> list[WorkerFacts[float]]:
        return [self.row(place) for place in range(len(self.packed))]

    @cached_property
    def columns(self) -> WorkerFacts[Column]:
        table = np.frombuffer(b"".join(self.packed), np.float64).reshape(len(self.packed), len(WorkerFacts._fields))
        return WorkerFacts(*np.ascontiguousarray(table.T))


def hash_53(name: str) -> int:
    """A hash that a float holds exactly, the same in every router."""
    return xxh3_64_intdigest(name.encode()) >> 11
