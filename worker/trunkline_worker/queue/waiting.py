"""What waits for admission: by lane, within a lane by tenant, within a tenant by due time.

Within a tenant, sequences that were preempted go first, oldest first: what was promised is finished first. They do not
go before other tenants'. After them come sequences that began at another worker: their readers wait in the midst of an
answer.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Set

from trunkline_worker.cache.sequence import Sequence
from trunkline_worker.lanes.fair_share import Account, Accounts
from trunkline_worker.lanes.lanes import LANES, Lane
from trunkline_worker.queue.sequence_heap import SequenceHeap

# Due time of a sequence without a deadline: after its arrival by this. One with a deadline goes earlier only if it is
# due earlier, so those without are not put off for ever.
PATIENCE_S = 60.0
RETURNING_KEY = float("-inf")  # what was preempted goes first within its tenant


class Waiting:
    """All waiting sequences. O(log n) to put and take; what it keeps is bounded by who waits."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.lanes = [Accounts(lane) for lane in LANES]
        self.num_tokens = [0 for _ in LANES]  # known tokens of those that never ran, by lane
        self.count = [0 for _ in LANES]  # of those that never ran
        self.preempted_tokens = [0 for _ in LANES]  # known tokens of those that were preempted, by lane
        self.matched_tokens = [0 for _ in LANES]  # of both, cached when they were last looked at: see has_matched()
        self.admitted_s = [0.0 for _ in LANES]  # when the last one of each lane left the queue
        self._due_s: list[list[float]] = [[] for _ in LANES]  # of those that never ran, in order
        self._members: dict[int, Sequence] = {}  # by id
        self._queues: dict[Account, SequenceHeap] = {}  # of accounts with something that waits
        self._by_age = [SequenceHeap(self._members) for _ in LANES]
        self.by_deadline = SequenceHeap(self._members)  # of those that never ran and have one: see deadlines.py
        self._deferred: list[SequenceHeap] = []  # where something is set aside

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
        """So many leading tokens of a sequence that waits are cached."""
        self.matched_tokens[sequence.lane] += num_tokens - sequence.num_known_cached
        sequence.num_known_cached = num_tokens

    def uncached_tokens(self, lane: Lane) -> int:
        """Tokens that are to be computed for those who wait in a lane, as far as is known."""
        return self.num_tokens[lane] + self.preempted_tokens[lane] - self.matched_tokens[lane]

    def put(self, sequence: Sequence, start_by_s: float | None = None) -> None:
        """A sequence that has never run.  start_by_s: after it its deadline is out of reach"""
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
        """A sequence that was preempted."""
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
        """Takes a sequence out, wherever it stands."""
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

    # Whose turn it is

    def next(self, lane: Lane) -> Sequence | None:
        """Who is admitted next in a lane, apart from those deferred. It stays where it is."""
        accounts = self.lanes[lane]
        while (account := accounts.next()) is not None:
            found = self._queues[account].first()
            if found is not None:
                return found
            accounts.set_aside()
        return None

    def defer(self, sequence: Sequence) -> None:
        """Whom next() has just named is passed over until restore()."""
        heap = self._queues[sequence.account]
        assert heap.first() is sequence, "only the next one can be deferred"
        heap.set_aside()
        self._deferred.append(heap)

    def of_other_tenants(self, lane: Lane, looked_at: Set[Account]) -> list[Sequence]:
        """The next sequence of each tenant of a lane, apart from these tenants; the least served tenant first."""
        others = [account for account in self._queues if account.lane is lane and account not in looked_at]
        others.sort(key=lambda account: account.virtual_tokens)
        found = [self._queues[account].first() for account in others]
        return [sequence for sequence in found if sequence is not None]

    def pass_over(self, lane: Lane) -> None:
        """The whole tenant whose sequence next() has just named is passed over until restore()."""
        self.lanes[lane].set_aside()

    def restore(self) -> None:
        """Every sequence counts again."""
        for heap in self._deferred:
            heap.restore()
        self._deferred.clear()
        for accounts in self.lanes:
            accounts.restore()

    def neglected_since_s(self, lane: Lane) -> float | None:
        """Since when a lane has had something waiting and nobody was admitted from it; None: nothing waits."""
        oldest_s = self.oldest_s(lane)
        return None if oldest_s is None else max(oldest_s, self.admitted_s[lane])

    def oldest_s(self, lane: Lane) -> float | None:
        """When the one of a lane that came first of those that wait came; None: nothing waits."""
        oldest = self._by_age[lane].first()
        return None if oldest is None else oldest.arrival_s

    def num_in_turn_before(self, account: Account) -> float:
        """About how many of a lane are admitted before one more of a tenant, if its tenants take turns by weight."""
        accounts = self.lanes[account.lane]
        others = accounts.waiting_weight() - (account.weight if account.num_queued else 0.0)
        return account.waiting * (1.0 + max(0.0, others) / account.weight)

    def queue_share(self, account: Account) -> float:
        """A tenant's part of the weights of all that wait in its lane and those above it, itself included, in
        (0, 1]."""
        others = 0.0
        for accounts in self.lanes[: account.lane + 1]:
            own = accounts.find(account.tenant)
            others += accounts.waiting_weight() - (own.weight if own is not None and own.num_queued else 0.0)
        return account.weight / (account.weight + max(0.0, others))

    def queued_by(self, account: Account) -> tuple[int, int]:
        """Sequences of a tenant that wait for their first admission in its lane and those above it, and their
        tokens."""
        own = [accounts.find(account.tenant) for accounts in self.lanes[: account.lane + 1]]
        found = [(one.waiting, one.waiting_tokens) for one in own if one is not None]
        return sum(count for count, _ in found), sum(tokens for _, tokens in found)

    def num_due_before(self, lane: Lane, due_s: float) -> int:
        """Sequences that never ran, of this lane and the ones above it, that go before one that is due then."""
        return sum(self.count[:lane]) + bisect_right(self._due_s[lane], due_s)

    def check_integrity(self) -> None:
        """Asserts that counts agree with members, and that nobody who waits holds blocks."""
        assert all(not s.block_table and not s.num_scheduled and not s.num_pending for s in self), "it holds blocks"
        assert not self._deferred, "somebody is still deferred"
        for lane in LANES:
            everyone = [s for s in self if s.lane is lane]
            preempted = sum(len(s.token_ids) for s in everyone if s.generation)
            assert self.preempted_tokens[lane] == preempted, "tokens miscounted"
            assert self.matched_tokens[lane] == sum(s.num_known_cached for s in everyone), "matches miscounted"
            self.lanes[lane].check_integrity()
            new = [s for s in self if s.lane is lane and not s.generation]
            assert self.count[lane] == len(new), "waiting sequences miscounted"
            assert self._due_s[lane] == sorted(map(due_s, new)), "due times miscounted"
            assert self.num_tokens[lane] == sum(len(s.token_ids) for s in new), "waiting tokens miscounted"
            for account in self.lanes[lane]:
                own = [s for s in new if s.account is account]
                assert account.waiting == len(own), "an account is miscounted"
                assert account.waiting_tokens == sum(len(s.token_ids) for s in own), "an account is miscounted"
                returning = sum(s.account is account and s.generation > 0 for s in everyone)
                assert account.returning == returning, "an account is miscounted"
        kept = sum(map(len, (*self._queues.values(), *self._by_age, self.by_deadline)))
        heaps = len(self._queues) + len(Lane) + 1
        assert kept <= 6 * len(self._members) + 64 * heaps, f"{kept} entries for {len(self._members)} that wait"


def due_s(sequence: Sequence) -> float:
    """By which a sequence that has never run goes before others of its tenant."""
    if sequence.num_output:
        return sequence.arrival_s
    return sequence.arrival_s + PATIENCE_S if sequence.deadline_s is None else sequence.deadline_s
