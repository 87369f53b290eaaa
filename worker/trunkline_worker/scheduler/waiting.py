"""Sequences that wait for admission: by lane, within a lane by tenant, within a tenant by due time.

Within a tenant, preempted sequences go first, oldest first, so that what was begun is finished first. They do not go
before other tenants' sequences. After them come sequences that began at another worker: their clients have received
part of the answer.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from trunkline_worker.cache.sequence import Sequence
from trunkline_worker.lanes.fair_share import Account, Accounts
from trunkline_worker.lanes.lanes import LANES, Lane

# (key, arrival, generation, sequence)
Entry = tuple[float, int, int, Sequence]

FEWEST_VOID = 64  # void entries below which sweeping them out is not worth it
# A sequence without a deadline is due this long after its arrival. One with a deadline goes before it only if it is due
# earlier, so sequences without deadlines do not starve.
PATIENCE_S = 60.0
RETURNING_KEY = float("-inf")  # preempted sequences go first within their tenant


class SequenceHeap:
    """A heap of waiting sequences from which any may leave: smallest key first, then the older sequence.

    An entry is valid while its sequence waits in the generation that it had when it was put here. Other entries are
    dropped at the top, or when more than half of all are of that kind.

    members: all waiting sequences, by id
    """

    __slots__ = ("_aside", "_entries", "_members", "_void")

    def __init__(self, members: dict[int, Sequence]) -> None:
        self._members = members
        self._entries: list[Entry] = []
        self._aside: list[Entry] = []
        self._void = 0  # upper bound of the entries that are not valid

    def __len__(self) -> int:
        """Entries in memory, valid or not."""
        return len(self._entries) + len(self._aside)

    def put(self, key: float, sequence: Sequence) -> None:
        """Adds a sequence."""
        heappush(self._entries, (key, sequence.arrival, sequence.generation, sequence))

    def left(self) -> None:
        """Called when a sequence that was put here does not wait any more."""
        self._void += 1
        if self._void >= FEWEST_VOID and 2 * self._void > len(self._entries):
            self._entries = [entry for entry in self._entries if self._is_valid(entry)]
            heapify(self._entries)
            self._void = 0

    def first(self) -> Sequence | None:
        """The first sequence that is not set aside; None if there is none."""
        entry = self.first_entry()
        return None if entry is None else entry[3]

    def first_entry(self) -> Entry | None:
        """The entry of first()."""
        entries = self._entries
        while entries and not self._is_valid(entries[0]):
            heappop(entries)
            self._void -= 1
        return entries[0] if entries else None

    def set_aside(self) -> None:
        """Passes over the first sequence until restore()."""
        assert self.first_entry() is not None, "the heap is empty"
        self._aside.append(heappop(self._entries))

    def restore(self) -> None:
        """Puts all sequences that were set aside back."""
        for entry in self._aside:
            heappush(self._entries, entry)
        self._aside.clear()

    def replace_first(self, key: float) -> None:
        """Gives the first sequence a new key."""
        *_, sequence = heappop(self._entries)
        self.put(key, sequence)

    def _is_valid(self, entry: Entry) -> bool:
        sequence = entry[3]
        return sequence.sequence_id in self._members and entry[2] == sequence.generation


class Waiting:
    """All waiting sequences. O(log n) to put and take; its memory is bounded by the number that wait."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.lanes = [Accounts(lane) for lane in LANES]
        self.num_tokens = [0 for _ in LANES]  # known tokens of sequences that never ran, by lane
        self.count = [0 for _ in LANES]  # sequences that never ran, by lane
        self.preempted_tokens = [0 for _ in LANES]  # known tokens of preempted sequences, by lane
        self.matched_tokens = [0 for _ in LANES]  # cached leading tokens of new and preempted ones: see has_matched()
        self.admitted_s = [0.0 for _ in LANES]  # when a sequence of each lane was last admitted
        self._due_s: list[list[float]] = [[] for _ in LANES]  # due times of sequences that never ran, in order
        self._members: dict[int, Sequence] = {}  # by id
        self._queues: dict[Account, SequenceHeap] = {}  # of accounts with waiting sequences
        self._by_age = [SequenceHeap(self._members) for _ in LANES]
        self.by_deadline = SequenceHeap(self._members)  # sequences that never ran and have a deadline: see deadlines.py
        self._deferred: list[SequenceHeap] = []  # heaps in which a sequence is set aside

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._members.values())

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.sequence_id in self._members

    @property
    def total_tokens(self) -> int:
        return sum(self.num_tokens)

    def has_matched(self, sequence: Sequence, num_tokens: int) -> None:
        """Notes how many leading tokens of a waiting sequence are cached."""
        self.matched_tokens[sequence.lane] += num_tokens - sequence.num_known_cached
        sequence.num_known_cached = num_tokens

    def uncached_tokens(self, lane: Lane) -> int:
        """Tokens that are to be computed for the waiting sequences of a lane, as far as is known."""
        return self.num_tokens[lane] + self.preempted_tokens[lane] - self.matched_tokens[lane]

    def put(self, sequence: Sequence, start_by_s: float | None = None) -> None:
        """Adds a sequence that has never run.  start_by_s: after this time its deadline is out of reach"""
        self._members[sequence.sequence_id] = sequence
        lane, account = sequence.lane, sequence.account
        self._queue_of(account).put(due_s(sequence), sequence)
        insort(self._due_s[lane], due_s(sequence))
        self.lanes[lane].join(account, len(sequence.token_ids))
        self.count[lane] += 1
        self.num_tokens[lane] += len(sequence.token_ids)
        self._by_age[lane].put(sequence.arrival_s, sequence)
        if start_by_s is not None:
            sequence.is_watched = True
            self.by_deadline.put(start_by_s, sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Adds a sequence that was preempted."""
        self._members[sequence.sequence_id] = sequence
        lane, account = sequence.lane, sequence.account
        self.preempted_tokens[lane] += len(sequence.token_ids)
        self._queue_of(account).put(RETURNING_KEY, sequence)
        self.lanes[lane].join_again(account)
        self._by_age[lane].put(sequence.arrival_s, sequence)

    def _queue_of(self, account: Account) -> SequenceHeap:
        queue = self._queues.get(account)
        if queue is None:
            queue = self._queues[account] = SequenceHeap(self._members)
        return queue

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence, whatever its position."""
        del self._members[sequence.sequence_id]
        lane, account = sequence.lane, sequence.account
        self.has_matched(sequence, 0)
        self._by_age[lane].left()
        if sequence.is_watched:
            sequence.is_watched = False
            self.by_deadline.left()
        if sequence.generation:
            self.preempted_tokens[lane] -= len(sequence.token_ids)
            self.lanes[lane].leave_again(account)
        else:
            self.count[lane] -= 1
            del self._due_s[lane][bisect_left(self._due_s[lane], due_s(sequence))]
            self.num_tokens[lane] -= len(sequence.token_ids)
            self.lanes[lane].leave(account, len(sequence.token_ids))
        if account.num_queued:
            self._queues[account].left()
        else:
            del self._queues[account]

    # Order

    def next(self, lane: Lane) -> Sequence | None:
        """The next sequence of a lane, apart from those deferred; None if there is none. It stays in the queue."""
        accounts = self.lanes[lane]
        while (account := accounts.next()) is not None:
            found = self._queues[account].first()
            if found is not None:
                return found
            accounts.set_aside()
        return None

    def defer(self, sequence: Sequence) -> None:
        """Passes over the sequence that next() has just returned, until restore()."""
        heap = self._queues[sequence.account]
        assert heap.first() is sequence, "only the next one can be deferred"
        heap.set_aside()
        self._deferred.append(heap)

    def pass_over(self, lane: Lane) -> None:
        """Passes over the whole tenant whose sequence next() has just returned, until restore()."""
        self.lanes[lane].set_aside()

    def restore(self) -> None:
        """Undoes every defer() and pass_over()."""
        for heap in self._deferred:
            heap.restore()
        self._deferred.clear()
        for accounts in self.lanes:
            accounts.restore()

    def neglected_since_s(self, lane: Lane) -> float | None:
        """Since when a lane has had waiting sequences and none was admitted; None: nothing waits in it."""
        oldest_s = self.oldest_s(lane)
        return None if oldest_s is None else max(oldest_s, self.admitted_s[lane])

    def oldest_s(self, lane: Lane) -> float | None:
        """Arrival time of the oldest waiting sequence in a lane; None: nothing waits in it."""
        oldest = self._by_age[lane].first()
        return None if oldest is None else oldest.arrival_s

    def num_in_turn_before(self, account: Account) -> float:
        """About how many sequences of its lane go before a tenant's next one, if tenants take turns by weight."""
        accounts = self.lanes[account.lane]
        others = accounts.waiting_weight() - (account.weight if account.num_queued else 0.0)
        return account.waiting * (1.0 + max(0.0, others) / account.weight)

    def queue_share(self, account: Account) -> float:
        """A tenant's part, in (0, 1], of the weights of all tenants with waiting sequences in its lane and those above
        it, itself included."""
        others = 0.0
        for accounts in self.lanes[: account.lane + 1]:
            own = accounts.find(account.tenant)
            others += accounts.waiting_weight() - (own.weight if own is not None and own.num_queued else 0.0)
        return account.weight / (account.weight + max(0.0, others))

    def queued_by(self, account: Account) -> tuple[int, int]:
        """How many sequences of a tenant wait for their first admission in its lane and those above it, and how many
        tokens they have."""
        own = [accounts.find(account.tenant) for accounts in self.lanes[: account.lane + 1]]
        found = [(one.waiting, one.waiting_tokens) for one in own if one is not None]
        return sum(count for count, _ in found), sum(tokens for _, tokens in found)

    def num_due_before(self, lane: Lane, due_s: float) -> int:
        """How many sequences that never ran go before one with this due time, in this lane and those above it."""
        return sum(self.count[:lane]) + bisect_right(self._due_s[lane], due_s)

    def check_integrity(self) -> None:
        """Asserts that counts agree with members, and that no waiting sequence holds blocks."""
        assert all(not s.block_table and not s.num_scheduled and not s.num_pending for s in self), "it holds blocks"
        assert not self._deferred, "a sequence is still deferred"
        for lane in LANES:
            own_lane = [s for s in self if s.lane is lane]
            preempted = sum(len(s.token_ids) for s in own_lane if s.generation)
            assert self.preempted_tokens[lane] == preempted, "tokens miscounted"
            assert self.matched_tokens[lane] == sum(s.num_known_cached for s in own_lane), "matches miscounted"
            self.lanes[lane].check_integrity()
            new = [s for s in self if s.lane is lane and not s.generation]
            assert self.count[lane] == len(new), "waiting sequences miscounted"
            assert self._due_s[lane] == sorted(map(due_s, new)), "due times miscounted"
            assert self.num_tokens[lane] == sum(len(s.token_ids) for s in new), "waiting tokens miscounted"
            for account in self.lanes[lane]:
                own = [s for s in new if s.account is account]
                assert account.waiting == len(own), "an account is miscounted"
                assert account.waiting_tokens == sum(len(s.token_ids) for s in own), "an account is miscounted"
                returning = sum(s.account is account and s.generation > 0 for s in own_lane)
                assert account.returning == returning, "an account is miscounted"
        kept = sum(map(len, (*self._queues.values(), *self._by_age, self.by_deadline)))
        heaps = len(self._queues) + len(Lane) + 1
        assert kept <= 6 * len(self._members) + 64 * heaps, f"{kept} entries for {len(self._members)} that wait"


def due_s(sequence: Sequence) -> float:
    """When a sequence that has never run is due: within a tenant, the earliest goes first."""
    if sequence.num_output:  # it began at another worker
        return sequence.arrival_s
    return sequence.arrival_s + PATIENCE_S if sequence.deadline_s is None else sequence.deadline_s
