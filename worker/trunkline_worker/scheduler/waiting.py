"""Sequences that wait for admission: by lane, within a lane by tenant, within a tenant by due time. Those that await a
resource have no place in this order: see awaiting.py.

Within a tenant, preempted sequences go first, oldest first, so that what was begun is finished first. They do not go
before other tenants' sequences. After them come sequences that began at another worker: their clients have received
part of the answer.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from operator import attrgetter

from trunkline_worker.cache.sequence import AwaitedResource, Sequence
from trunkline_worker.scheduler.awaiting import Awaiting
from trunkline_worker.step.fair_share import Account, Accounts
from trunkline_worker.step.lanes import LANES, Lane

# (key, arrival, tag, sequence)
Entry = tuple[float, int, int, Sequence]

FEWEST_VOID = 64  # void entries below which sweeping them out is not worth it
# A sequence without a deadline is due this long after its arrival. One with a deadline goes before it only if it is due
# earlier, so sequences without deadlines do not starve.
PATIENCE_S = 60.0
RETURNING_KEY = float("-inf")  # preempted sequences go first within their tenant
# Tags of a SequenceHeap. A ticket is 0, and is_watched is False, while a sequence has no entry.
TICKET: Callable[[Sequence], int] = attrgetter("ticket")
WATCHED: Callable[[Sequence], int] = attrgetter("is_watched")


class SequenceHeap:
    """A heap of waiting sequences from which any may leave: smallest key first, then the older sequence.

    An entry is valid while its sequence has the tag that it had when it was put here. Other entries are dropped at the
    top, or when more than half of all are of that kind.

    tag: of a sequence; it never has an earlier one again
    """

    __slots__ = ("_aside", "_entries", "_tag", "_void")

    def __init__(self, tag: Callable[[Sequence], int]) -> None:
        self._tag = tag
        self._entries: list[Entry] = []
        self._aside: list[Entry] = []
        self._void = 0  # upper bound of the entries that are not valid

    def __len__(self) -> int:
        """Entries in memory, valid or not."""
        return len(self._entries) + len(self._aside)

    def put(self, key: float, sequence: Sequence) -> None:
        """Adds a sequence."""
        heappush(self._entries, (key, sequence.arrival, self._tag(sequence), sequence))

    def left(self) -> None:
        """Called when a sequence that was put here has lost its tag."""
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
        return entry[2] == self._tag(entry[3])


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
        self.awaiting = Awaiting()  # all others are ready
        self.num_ready = 0
        self.new_and_ready = [0 for _ in LANES]  # ready sequences that never ran, by lane
        self._due_s: list[list[float]] = [[] for _ in LANES]  # due times of ready sequences that never ran, in order
        self._members: dict[int, Sequence] = {}  # by id
        self._tickets = 0  # given out so far
        self._queues: dict[Account, SequenceHeap] = {}  # of accounts with ready sequences
        self._by_age = [SequenceHeap(TICKET) for _ in LANES]  # by the time since when each could have been admitted
        self.by_deadline = SequenceHeap(WATCHED)  # sequences that never ran and have a deadline: see deadlines.py
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
        lane = sequence.lane
        self.lanes[lane].join(sequence.account, len(sequence.token_ids))
        self.count[lane] += 1
        self.num_tokens[lane] += len(sequence.token_ids)
        if start_by_s is not None:
            sequence.is_watched = True
            self.by_deadline.put(start_by_s, sequence)
        if sequence.awaits:
            sequence.awaits_since_s = sequence.arrival_s
            self.awaiting.add(sequence)
        else:
            self._line_up(sequence, sequence.arrival_s)

    def put_back(self, sequence: Sequence) -> None:
        """Adds a sequence that was preempted."""
        self._members[sequence.sequence_id] = sequence
        self.preempted_tokens[sequence.lane] += len(sequence.token_ids)
        self.lanes[sequence.lane].join_again(sequence.account)
        self._line_up(sequence, sequence.arrival_s)

    def hold(self, sequence: Sequence, resource: AwaitedResource, now_s: float) -> None:
        """A waiting sequence awaits a resource from now on."""
        if not sequence.awaits:
            self._step_out(sequence)
            sequence.awaits_since_s = now_s
        self.awaiting.add(sequence, resource)

    def release(self, resource: AwaitedResource, now_s: float) -> None:
        """A resource is there: sequences that await nothing else are ready."""
        for sequence in self.awaiting.settle(resource):
            sequence.awaited_s += now_s - sequence.awaits_since_s
            self._line_up(sequence, now_s)

    def _line_up(self, sequence: Sequence, since_s: float) -> None:
        """Gives a sequence its place in the order.  since_s: since when it could have been admitted"""
        lane, account = sequence.lane, sequence.account
        self._tickets += 1
        sequence.ticket = self._tickets
        self.num_ready += 1
        key = RETURNING_KEY
        if not sequence.generation:
            key = due_s(sequence)
            insort(self._due_s[lane], key)
            self.new_and_ready[lane] += 1
        queue = self._queues.get(account)
        if queue is None:
            queue = self._queues[account] = SequenceHeap(TICKET)
        queue.put(key, sequence)
        self._by_age[lane].put(since_s, sequence)
        self.lanes[lane].line_up(account)

    def _step_out(self, sequence: Sequence) -> None:
        """Takes a sequence out of the order."""
        lane, account = sequence.lane, sequence.account
        sequence.ticket = 0
        self.num_ready -= 1
        self._by_age[lane].left()
        if not sequence.generation:
            del self._due_s[lane][bisect_left(self._due_s[lane], due_s(sequence))]
            self.new_and_ready[lane] -= 1
        self.lanes[lane].step_out(account)
        if account.ready:
            self._queues[account].left()
        else:
            del self._queues[account]

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence, whatever its position."""
        del self._members[sequence.sequence_id]
        lane, account = sequence.lane, sequence.account
        self.has_matched(sequence, 0)
        if sequence.awaits:
            self.awaiting.remove(sequence)
        else:
            self._step_out(sequence)
        if sequence.is_watched:
            sequence.is_watched = False
            self.by_deadline.left()
        if sequence.generation:
            self.preempted_tokens[lane] -= len(sequence.token_ids)
            self.lanes[lane].leave_again(account)
        else:
            self.count[lane] -= 1
            self.num_tokens[lane] -= len(sequence.token_ids)
            self.lanes[lane].leave(account, len(sequence.token_ids))

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
        """Since when a lane has had ready sequences and none was admitted; None: it has none."""
        oldest_s = self.oldest_s(lane)
        return None if oldest_s is None else max(oldest_s, self.admitted_s[lane])

    def oldest_s(self, lane: Lane) -> float | None:
        """Since when the oldest ready sequence of a lane could have been admitted; None: none is ready."""
        oldest = self._by_age[lane].first_entry()
        return None if oldest is None else oldest[0]

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
        """How many ready sequences that never ran go before one with this due time, in this lane and those above it."""
        return sum(self.new_and_ready[:lane]) + bisect_right(self._due_s[lane], due_s)

    def check_integrity(self) -> None:
        """Asserts that counts agree with members, and that no waiting sequence holds blocks."""
        assert all(not s.block_table and not s.num_scheduled and not s.num_pending for s in self), "it holds blocks"
        assert not self._deferred, "a sequence is still deferred"
        assert all(s.is_ready != bool(s.awaits) for s in self), "a sequence must either await or be in the order"
        self.awaiting.check_integrity(self._members)
        assert self.num_ready == sum(s.is_ready for s in self), "ready sequences miscounted"
        for lane in LANES:
            own_lane = [s for s in self if s.lane is lane]
            preempted = sum(len(s.token_ids) for s in own_lane if s.generation)
            assert self.preempted_tokens[lane] == preempted, "tokens miscounted"
            assert self.matched_tokens[lane] == sum(s.num_known_cached for s in own_lane), "matches miscounted"
            self.lanes[lane].check_integrity()
            new = [s for s in self if s.lane is lane and not s.generation]
            assert self.count[lane] == len(new), "waiting sequences miscounted"
            assert self._due_s[lane] == sorted(due_s(s) for s in new if not s.awaits), "due times miscounted"
            assert self.new_and_ready[lane] == len(self._due_s[lane]), "ready sequences miscounted"
            assert self.num_tokens[lane] == sum(len(s.token_ids) for s in new), "waiting tokens miscounted"
            for account in self.lanes[lane]:
                own = [s for s in new if s.account is account]
                assert account.waiting == len(own), "an account is miscounted"
                assert account.waiting_tokens == sum(len(s.token_ids) for s in own), "an account is miscounted"
                returning = sum(s.account is account and s.generation > 0 for s in own_lane)
                assert account.returning == returning, "an account is miscounted"
                ready = sum(s.account is account and not s.awaits for s in own_lane)
                assert account.ready == ready, "an account is miscounted"
        kept = sum(map(len, (*self._queues.values(), *self._by_age, self.by_deadline)))
        heaps = len(self._queues) + len(Lane) + 1
        assert kept <= 6 * len(self._members) + 64 * heaps, f"{kept} entries for {len(self._members)} that wait"


def due_s(sequence: Sequence) -> float:
    """When a sequence that has never run is due: within a tenant, the earliest goes first."""
    if sequence.num_output:  # it began at another worker
        return sequence.arrival_s
    return sequence.arrival_s + PATIENCE_S if sequence.deadline_s is None else sequence.deadline_s
