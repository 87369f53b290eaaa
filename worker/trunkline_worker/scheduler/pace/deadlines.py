"""Requests that cannot meet their deadlines any more: refused at once, because another worker may still be in time."""

from trunkline.status import (
    CODE_DEADLINE_EXCEEDED,
    CODE_RESOURCE_EXHAUSTED,
    DEADLINE_EXCEEDED,
    OVERLOADED,
    RequestRefused,
)
from trunkline_worker.cache.blocks import KVBlocks
from trunkline_worker.cache.sequence import Sequence
from trunkline_worker.scheduler.pace.step_cost import StepCost
from trunkline_worker.scheduler.queue.waiting import Waiting


class Deadlines:
    """Judges by the first token: how long the output will be is up to the client."""

    def __init__(self, waiting: Waiting, blocks: KVBlocks, cost: StepCost) -> None:
        self._heap = waiting.by_deadline  # by latest start, as of when it was last computed
        self._blocks = blocks
        self._cost = cost

    def out_of_reach(self, sequence: Sequence, wait_s: float, now_s: float) -> bool:
        """Whether a sequence that will wait for `wait_s` cannot have its first token in time."""
        start_by_s = self.start_by_s(sequence)
        if start_by_s is None or now_s + wait_s <= start_by_s:
            return False
        # The cached prefix need not be computed; it is looked up only where it matters.
        self._blocks.match(sequence)
        start_by_s = self.start_by_s(sequence)
        return start_by_s is not None and now_s + wait_s > start_by_s

    def hopeless(self, now_s: float) -> Sequence | None:
        """A waiting sequence that would be too late even if it started now; None if there is none."""
        while (entry := self._heap.first_entry()) is not None and entry[0] < now_s:
            sequence = entry[3]
            if self.out_of_reach(sequence, 0.0, now_s):
                return sequence
            start_by_s = self.start_by_s(sequence)
            assert start_by_s is not None, "only sequences with a deadline are watched"
            self._heap.replace_first(max(start_by_s, now_s))
            if start_by_s <= now_s:
                break
        return None

    def next_s(self) -> float | None:
        """When hopeless() may next find a sequence; None: no waiting sequence has a deadline."""
        entry = self._heap.first_entry()
        return None if entry is None else entry[0]

    def start_by_s(self, sequence: Sequence) -> float | None:
        """The latest time to start a sequence whose uncached tokens are computed in one piece; None: no deadline."""
        if sequence.deadline_s is None:
            return None
        if not self._cost.is_known:
            return sequence.deadline_s
        cached = len(sequence.found) * self._blocks.block_size
        num_left, is_scored = len(sequence.token_ids) - cached, sequence.wants_prompt_logprobs
        chunks_s = self._cost.chunk_s(num_left, cached, is_scored=is_scored)
        return sequence.deadline_s - self._cost.fixed_s - chunks_s


def too_late(retry_delay_s: float | None) -> RequestRefused:
    """The error for a late request.  retry_delay_s: None: not even an idle worker would be in time"""
    if retry_delay_s is None:
        return RequestRefused(
            CODE_DEADLINE_EXCEEDED,
            DEADLINE_EXCEEDED,
            "computing the prompt alone takes longer than the deadline leaves",
        )
    return RequestRefused(
        CODE_RESOURCE_EXHAUSTED,
        OVERLOADED,
        "the first token cannot be there before the deadline",
        retry_delay_ms=max(1, round(retry_delay_s * 1e3)),
    )
