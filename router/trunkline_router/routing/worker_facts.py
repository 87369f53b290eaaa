"""The numbers that the policy reads of a worker, as rows and columns of a table of the fleet."""

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
    """One worker's numbers as floats, one row of a table; or all workers' as columns of the table."""

    # The time of a step, see StepCostModel; NaN if the worker has not reported it
    fixed_s: Number
    token_s: Number
    kv_token_s: Number
    pair_s: Number
    step_tokens: Number  # most in a step
    lower_step_tokens: Number  # most of the lower lanes
    step_target_s: Number  # bound on a step with chunks of prompts; infinite: none
    # Uncached tokens of prompts before a request of each lane: of its lane and higher lanes
    queued_interactive: Number
    queued_standard: Number
    queued_batch: Number
    waiting_tokens: Number  # of prompts that have no blocks yet, in all lanes
    queued_context: Number  # estimated (query, key) pairs per queued token
    choices: Number  # running and waiting
    most_running: Number  # choices
    decode_kv_tokens: Number  # sum of the context lengths of choices that run or soon will
    block_size: Number
    live_blocks: Number
    available_blocks: Number  # free, or only cached
    total_blocks: Number  # 0: not reported
    # Time until all that waits in a lane and higher lanes is admitted; 0: nothing waits
    admission_interactive_s: Number
    admission_standard_s: Number
    admission_batch_s: Number
    slow_start_share: Number  # in (0, 1]
    by_load: Number  # 1: its cache reports do not count
    name_hash: Number  # of 53 bits


ROW = Struct(f"<{len(WorkerFacts._fields)}d")


@dataclass(frozen=True)
class WorkerTable:
    """The workers to choose among; index i of every sequence is the same worker. A few are read row by row, many column
    by column."""

    worker_ids: Sequence[str]
    matched_tokens: Sequence[float] | Column  # leading tokens of the prompt in each one's cache
    packed: Sequence[bytes]  # rows

    @property
    def most_matched(self) -> int:
        matched = self.matched_tokens
        return int(matched.max() if isinstance(matched, np.ndarray) else max(matched))

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
    """Returns a hash that a float represents exactly, the same in every router."""
    return xxh3_64_intdigest(name.encode()) >> 11
