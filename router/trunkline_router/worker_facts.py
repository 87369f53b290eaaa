"""What the policy reads of a worker, as numbers that lie side by side for a whole fleet."""

from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

Column = NDArray[np.float64]  # [num_workers]


class WorkerFacts(NamedTuple):
    """One worker. All are floats: they travel as one row of a table."""

    # What a step takes, see StepCostModel; not a number where the worker has not said
    fixed_s: float
    token_s: float
    kv_token_s: float
    pair_s: float
    step_tokens: float  # most in a step
    lower_step_tokens: float  # most of the lower lanes
    step_target_s: float  # a step with chunks of prompts stays under it; infinite: no target
    # Uncached tokens of prompts before a request of each lane: of its lane and those above
    queued_interactive: float
    queued_standard: float
    queued_batch: float
    waiting_tokens: float  # of prompts that have no blocks yet, whatever their lane
    queued_context: float  # (query, key) pairs of such a token, about
    choices: float  # running and waiting
    most_running: float  # choices
    decode_kv_tokens: float  # context lengths of those that run or soon will, summed
    block_size: float
    live_blocks: float
    available_blocks: float  # free, or cached and nothing else
    total_blocks: float  # 0: not said
    # When what waits in a lane and those above will have been admitted; 0: nothing waits
    admission_interactive_s: float
    admission_standard_s: float
    admission_batch_s: float
    slow_start_share: float  # in (0, 1]
    by_load: float  # 1: its cache is not counted on
    name_hash: float  # of 53 bits


ROW = Struct(f"<{len(WorkerFacts._fields)}d")


@dataclass(frozen=True, slots=True)
class WorkerTable:
    """The workers among which one is chosen, one per place in every sequence."""

    worker_ids: Sequence[str]
    matched_tokens: Column  # leading tokens of the prompt that each one's cache holds
    columns: NDArray[np.float64]  # [facts, num_workers]

    def __getitem__(self, name: str) -> Column:
        """A column, by the name of the fact."""
        return self.columns[PLACES[name]]  # type: ignore[no-any-return]


PLACES = {name: place for place, name in enumerate(WorkerFacts._fields)}


def worker_table(worker_ids: Sequence[str], matched_tokens: Column, rows: Sequence[bytes]) -> WorkerTable:
    """rows: packed with ROW"""
    table = np.frombuffer(b"".join(rows), np.float64).reshape(len(rows), len(PLACES))
    return WorkerTable(worker_ids, matched_tokens, np.ascontiguousarray(table.T))


def hash_53(name: str) -> int:
    """A hash that a float holds exactly, the same in every router."""
    return xxh3_64_intdigest(name.encode()) >> 11
