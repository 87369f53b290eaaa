"""Requests that cannot meet their deadlines any more: refused as soon as that is known, while another worker may."""

from trunkline.status import CODE_RESOURCE_EXHAUSTED, OVERLOADED, RequestRefused
from trunkline_worker.sequence import Sequence
from trunkline_worker.step_cost import StepCost
from trunkline_worker.waiting import Waiting


class Deadlines:
    """Judges by the first token: how long the output will be is the client's business."""

    def __init__(self, waiting: Waiting, cost: StepCost) -> None:
        self._waiting = waiting
        self._cost = cost

    def out_of_reach(self, sequence: Sequence, wait_s: float, now_s: float) -> bool:
        """Whether a sequence that will wait so long cannot have its first token in time."""
        if sequence.deadline_s is None:
            return False
        return now_s + wait_s + self._prefill_s(sequence) > sequence.deadline_s

    def hopeless(self, now_s: float) -> Sequence | None:
        """A waiting sequence that would be too late even if it were started now."""
        sequence = self._waiting.earliest_deadline()
        if sequence is None or not self.out_of_reach(sequence, 0.0, now_s):
            return None
        return sequence

    def next_s(self) -> float | None:
        """When the next one becomes hopeless."""
        sequence = self._waiting.earliest_deadline()
        if sequence is None or sequence.deadline_s is None:
            return None
        return sequence.deadline_s - self._prefill_s(sequence)

    def _prefill_s(self, sequence: Sequence) -> float:
        """The least time until its first token: what of it was not found in the cache, computed in one piece."""
        if not self._cost.is_known:
            return 0.0
        cached = len(sequence.found) * self._waiting.block_size
        return self._cost.fixed_s + self._cost.chunk_s(len(sequence.token_ids) - cached, cached)


def too_late(retry_delay_s: float) -> RequestRefused:
    """What such a request is told."""
    return RequestRefused(
        CODE_RESOURCE_EXHAUSTED,
        OVERLOADED,
        "the first token cannot be there before the deadline",
        retry_delay_ms=round(retry_delay_s * 1e3),
    )
