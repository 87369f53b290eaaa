"""Static batching, a baseline: a batch forms when nothing runs and stays as it is until its last member has ended.

A member that has ended gives its KV back at once, which is to the baseline's advantage.
"""

from trunkline_worker.cache.sequence import Sequence
from trunkline_worker.lanes.lanes import LANES, Lane
from trunkline_worker.scheduler.queue.waiting import Waiting
from trunkline_worker.step.plan import Padding, SequenceStep


class StaticBatching:
    """Batches of up to `size` sequences, without padding. The members of a batch are settled when it forms."""

    admits_while_running = False

    def __init__(self, waiting: Waiting, size: int) -> None:
        self._waiting = waiting
        self._size = size
        self._expected: dict[int, Sequence] = {}  # members of the batch being formed that have not joined yet, by id
        self._deferred: set[int] = set()  # ids of those among them that are passed over
        self._prompts: list[int] = []  # tokens that each member had to compute when it joined

    def begin_step(self, *, busy: bool, now_s: float) -> None:
        if self._expected:
            self._expected = {number: s for number, s in self._expected.items() if s in self._waiting}
            if not self._expected and self._prompts:
                self.close()  # the members it waited for were aborted
        if busy:
            return
        self._expected = {}
        self._prompts = []
        opens_s = self.opens_s()
        num_waiting = len(self._waiting)
        if num_waiting and (opens_s is None or num_waiting >= self._size or now_s >= opens_s):
            self._settle_members()

    def _settle_members(self) -> None:
        for lane in LANES:
            while len(self._expected) < self._size and (sequence := self._waiting.next(lane)) is not None:
                self._expected[sequence.sequence_id] = sequence
                self._waiting.defer(sequence)
        self._waiting.restore()

    def opens_s(self) -> float | None:
        return None

    def next(self, lane: Lane) -> Sequence | None:
        for sequence_id, sequence in self._expected.items():
            if sequence.lane is lane and sequence_id not in self._deferred and sequence in self._waiting:
                return sequence
        return None

    def defer(self, sequence: Sequence) -> None:
        self._deferred.add(sequence.sequence_id)

    def restore(self) -> None:
        self._waiting.restore()
        self._deferred.clear()

    def joined(self, sequence: Sequence) -> None:
        del self._expected[sequence.sequence_id]
        self._prompts.append(len(sequence.token_ids) - sequence.num_computed)
        if not self._expected:
            self.close()

    def close(self) -> None:
        self._expected = {}

    def holds_decodes(self, running: list[Sequence]) -> bool:
        return False

    def releases_decodes(self, running: list[Sequence]) -> bool:
        return False

    def padding(self, tokens_left: int, steps: list[SequenceStep]) -> Padding | None:
        return None
