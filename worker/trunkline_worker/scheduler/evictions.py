"""Preempting one sequence: its blocks go back to the pool and it goes back to the queue, a few times in each step."""

from trunkline_worker.cache.sequence import Sequence, StepMark
from trunkline_worker.scheduler.queue.waiting import Waiting
from trunkline_worker.scheduler.running_set import RunningSet
from trunkline_worker.scheduler.stats import EngineStats

# Preempting is a last resort: if more sequences have to go in one step, the rest goes in the next.
MAX_PREEMPTIONS_PER_STEP = 8


class Evictions:
    """Carries out the preemptions of a step, and counts them."""

    def __init__(self, running: RunningSet, waiting: Waiting, stats: EngineStats) -> None:
        self._running = running
        self._waiting = waiting
        self._stats = stats
        self.left = MAX_PREEMPTIONS_PER_STEP  # in this step
        self._preempted: list[int] = []  # ids, since take_preempted() was last called

    @property
    def has_any(self) -> bool:
        """Whether a sequence was preempted in this step."""
        return self.left < MAX_PREEMPTIONS_PER_STEP

    def begin_step(self) -> None:
        """Called before each step."""
        self.left = MAX_PREEMPTIONS_PER_STEP

    def take_preempted(self) -> list[int]:
        """Ids of the sequences preempted since the last call, each as often as it was."""
        if not self._preempted:
            return []
        preempted, self._preempted = self._preempted, []
        return preempted

    def evict(self, sequence: Sequence) -> None:
        """Takes a running sequence's blocks and puts it back into the queue."""
        self.left -= 1
        self._stats.preempted(sequence.num_scheduled)
        self._preempted.append(sequence.sequence_id)
        sequence.num_evicted = max(sequence.num_evicted, sequence.num_computed)
        if sequence.last_token is not None:
            sequence.last_token = StepMark(*sequence.last_token)  # its next token does not simply follow
        sequence.num_charged = max(sequence.num_charged, sequence.num_scheduled)
        self._running.leave(sequence)
        sequence.generation += 1
        sequence.promised_len = 0
        self._waiting.put_back(sequence)

    def may_evict(self, sequence: Sequence) -> bool:
        """Whether a running sequence may be preempted: neither an aged one nor one that the current step has settled
        on."""
        return not sequence.is_aged and not self._running.is_settled(sequence)

    def of_lower_lanes(self, sequence: Sequence) -> list[Sequence]:
        """Running sequences of lower lanes that may be preempted for this one."""
        return [s for s in self._running.members if s.lane > sequence.lane and self.may_evict(s)]
