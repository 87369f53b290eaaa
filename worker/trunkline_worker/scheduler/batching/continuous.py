"""Continuous batching: any waiting sequence may join in any step. This is what workers serve with."""

from trunkline_worker.cache.sequence import Sequence
from trunkline_worker.lanes.lanes import Lane
from trunkline_worker.scheduler.queue.waiting import Waiting
from trunkline_worker.step.plan import Padding, SequenceStep

# Deferred sequences of one tenant after which the next tenant's are looked at, so that one tenant's sequences that wait
# for a prefix do not hide all others.
MAX_DEFERRED_OF_TENANT = 16


class ContinuousBatching:
    """Follows the order of the waiting queue and never pads."""

    admits_while_running = True

    def __init__(self, waiting: Waiting) -> None:
        self._waiting = waiting
        self._num_deferred = 0

    def begin_step(self, *, busy: bool, now_s: float) -> None:
        pass

    def opens_s(self) -> float | None:
        return None

    def next(self, lane: Lane) -> Sequence | None:
        return self._waiting.next(lane)

    def defer(self, sequence: Sequence) -> None:
        self._num_deferred += 1
        if self._num_deferred % MAX_DEFERRED_OF_TENANT:
            self._waiting.defer(sequence)
        else:
            self._waiting.pass_over(sequence.lane)

    def restore(self) -> None:
        self._num_deferred = 0
        self._waiting.restore()

    def joined(self, sequence: Sequence) -> None:
        pass

    def close(self) -> None:
        pass

    def holds_decodes(self, running: list[Sequence]) -> bool:
        return False

    def releases_decodes(self, running: list[Sequence]) -> bool:
        return False

    def padding(self, tokens_left: int, steps: list[SequenceStep]) -> Padding | None:
        return None
