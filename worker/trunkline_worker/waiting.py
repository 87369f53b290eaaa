"""What waits for admission: by lane, within a lane by tenant, within a tenant by due time.

Sequences that were preempted go before everything else of their lane, oldest first: what was promised is finished
first.
"""

from collections.abc import Iterator
from heapq import heappop, heappush

from trunkline_worker.fair_share import Account, Accounts
from trunkline_worker.lanes import Lane
from trunkline_worker.sequence import Sequence

# Due time of a sequence without a deadline: after its arrival by this. One with a deadline goes earlier only if it is
# due earlier, so those without are not put off for ever.
PATIENCE_S = 60.0


# (what counts, arrival, generation, sequence): an entry is void once its sequence does not wait, or waits again.
Heap = list[tuple[float, int, int, Sequence]]


class Waiting:
    """All waiting sequences. O(log n) to put and take; removing from the middle is lazy."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.lanes = [Accounts(lane) for lane in Lane]
        self.num_tokens = [0 for _ in Lane]  # known tokens of those that never ran, by lane
        self.count = [0 for _ in Lane]  # of those that never ran
        self._members: dict[int, Sequence] = {}  # by id
        self._queues: dict[Account, Heap] = {}
        self._returning: list[Heap] = [[] for _ in Lane]
        self._by_age: list[Heap] = [[] for _ in Lane]
        self.admitted_s = [0.0 for _ in Lane]  # when the last one of each lane left the queue
        self._by_deadline: Heap = []  # of those that have one

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._members.values())

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.sequence_id in self._members

    @property
    def total_tokens(self) -> int:
        return sum(self.num_tokens)

    def put(self, sequence: Sequence) -> None:
        """A sequence that has never run."""
        self._members[sequence.sequence_id] = sequence
        lane, account = sequence.lane, sequence.account
        heappush(self._queues.setdefault(account, []), (_due_s(sequence), sequence.arrival, 0, sequence))
        self.lanes[lane].join(account)
        self.count[lane] += 1
        self.num_tokens[lane] += len(sequence.token_ids)
        heappush(self._by_age[lane], (sequence.arrival_s, sequence.arrival, 0, sequence))
        if sequence.deadline_s is not None:
            heappush(self._by_deadline, (sequence.deadline_s, sequence.arrival, 0, sequence))

    def put_back(self, sequence: Sequence) -> None:
        """A sequence that was preempted."""
        self._members[sequence.sequence_id] = sequence
        generation = sequence.generation
        heappush(self._returning[sequence.lane], (0.0, sequence.arrival, generation, sequence))
        heappush(self._by_age[sequence.lane], (sequence.arrival_s, sequence.arrival, generation, sequence))

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it stands."""
        del self._members[sequence.sequence_id]
        if sequence.generation:
            return
        lane, account = sequence.lane, sequence.account
        self.count[lane] -= 1
        self.num_tokens[lane] -= len(sequence.token_ids)
        self.lanes[lane].leave(account)
        if not account.waiting:
            del self._queues[account]

    def next(self, lane: Lane, skipped: set[int]) -> Sequence | None:
        """Who is admitted next in a lane, apart from the sequence ids `skipped`. It stays where it is."""
        found = _first(self._returning[lane], self._members, skipped)
        if found is not None:
            return found
        passed_over: set[str] = set()
        while (account := self.lanes[lane].next(passed_over)) is not None:
            found = _first(self._queues[account], self._members, skipped)
            if found is not None:
                return found
            passed_over.add(account.tenant)
        return None

    def neglected_since_s(self, lane: Lane) -> float | None:
        """Since when a lane has had something waiting and nobody was admitted from it; None: nothing waits."""
        oldest = _first(self._by_age[lane], self._members, set())
        return None if oldest is None else max(oldest.arrival_s, self.admitted_s[lane])

    def earliest_deadline(self) -> Sequence | None:
        """Of those that never ran, the one whose deadline comes first."""
        return _first(self._by_deadline, self._members, set()) if self._by_deadline else None

    def num_due_before(self, lane: Lane, due_s: float) -> int:
        """Sequences that never ran, of this lane and the ones above it, that go before one that is due then."""
        higher = sum(self.count[:lane])
        members = self._members.values()
        return higher + sum(1 for s in members if s.lane is lane and not s.generation and _due_s(s) <= due_s)

    def check_integrity(self) -> None:
        """Asserts that counts agree with members, and that nobody who waits holds blocks."""
        assert all(not s.block_table and not s.num_scheduled and not s.num_pending for s in self), "it holds blocks"
        for lane in Lane:
            self.lanes[lane].check_integrity()
            new = [s for s in self if s.lane is lane and not s.generation]
            assert self.count[lane] == len(new), "waiting sequences miscounted"
            assert self.num_tokens[lane] == sum(len(s.token_ids) for s in new), "waiting tokens miscounted"
            for account in self.lanes[lane]:
                assert account.waiting == sum(s.account is account for s in new), "an account is miscounted"


def _due_s(sequence: Sequence) -> float:
    return sequence.arrival_s + PATIENCE_S if sequence.deadline_s is None else sequence.deadline_s


def _first(heap: Heap, members: dict[int, Sequence], skipped: set[int]) -> Sequence | None:
    """The first entry that counts and is not skipped; void ones are dropped on the way."""
    aside: Heap = []
    found: Sequence | None = None
    while heap:
        _, _, generation, sequence = heap[0]
        if sequence.sequence_id not in members or generation != sequence.generation:
            heappop(heap)
        elif sequence.sequence_id in skipped:
            aside.append(heappop(heap))
        else:
            found = sequence
            break
    for entry in aside:
        heappush(heap, entry)
    return found
