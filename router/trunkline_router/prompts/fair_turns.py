"""The order in which accounts use a few places. Pure: the time is an argument.

- Accounts take turns by the time for which they have held places, divided by their weight (start-time fair queueing:
  Goyal, Vin and Cheng, SIGCOMM 1996). One account never holds more than its part of the places.
- An account that is not known starts at virtual time: what an account that always had a job would have had by now
  (generalised processor sharing: Parekh and Gallager, 1993). One that comes back makes up for the time in which it had
  no job. Otherwise jobs that come one by one under many names would go before another account for ever.
- A job that holds its place for longer than a slice makes its account slow. The account stays slow until all such jobs
  have ended and a job of it has ended within a slice. Slow accounts together leave one place to the others.
- When several accounts become slow at once and hold all places, one job gives way: the last one to begin among those
  that outlasted their slice. It waits for another turn, and gives way only once.

A job of an account that is not slow therefore waits for at most one slice of each other account that had jobs while it
waited, and for what its account has had beyond the level.
"""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

MOST_REMEMBERED = 1024  # accounts without jobs that are slow, or have used more than their share so far


@dataclass(frozen=True, slots=True)
class Bounds:
    """How many jobs, and bytes of jobs, may wait or run: of one account and of all."""

    jobs_of_one: int
    jobs_of_all: int
    bytes_of_one: int
    bytes_of_all: int


@dataclass(slots=True, eq=False)
class Account:
    """What takes turns: a tenant, say."""

    key: Hashable
    weight: float
    served: float  # seconds of places divided by the weight, counted on from the level at which it joined
    waiting: "OrderedDict[Job, None]" = field(default_factory=OrderedDict)
    num_jobs: int = 0  # that wait or run
    num_bytes: int = 0  # of these
    num_held: int = 0  # places
    num_outlasting: int = 0  # jobs that outlasted a slice, running or waiting again
    is_slow: bool = False
    num_entries: int = 0  # in the heaps so far: only the last one is valid
    left_s: float = 0.0  # virtual time when it last had a job


@dataclass(slots=True, eq=False)
class Job:
    """A job, from joining to its end."""

    account: Account
    num_bytes: int
    begun_s: float | None = None  # None: it waits
    has_outlasted: bool = False
    has_ended: bool = False
    has_given_way: bool = False  # it was recalled from its place, or is about to leave it


class FairTurns:
    """Turns at `places` places, of which one account holds at most `of_one`. Both are at least 1."""

    def __init__(self, places: int, of_one: int, bounds: Bounds) -> None:
        self.places, self.of_one, self.bounds = places, of_one, bounds
        self.num_free = places
        self._most_slow = max(1, places - 1)  # a single place is for all accounts
        self._num_slow = 0  # places held by slow accounts
        self._num_jobs = 0
        self._num_bytes = 0
        self._level = 0.0  # `served` of the account that began last: accounts that come back start from it at least
        self._virtual_s = 0.0  # virtual time: new accounts start from it at least
        self._weights = 0.0  # of the accounts with jobs
        self._accounts: OrderedDict[Hashable, Account] = OrderedDict()
        self._remembered: OrderedDict[Hashable, Account] = OrderedDict()  # without jobs
        self._quick: list[tuple[float, int, Account, int]] = []  # heaps of accounts that wait and may hold more
        self._slow: list[tuple[float, int, Account, int]] = []
        self._num_entries = 0
        self._running: OrderedDict[Job, None] = OrderedDict()  # in the order in which they began
        self._recalled: Job | None = None  # has not left its place yet

    @property
    def is_idle(self) -> bool:
        """Whether no job waits or runs."""
        return not self._num_jobs

    def join(self, key: Hashable, num_bytes: int, weight: float) -> Job | None:
        """A new job, which waits; None where its account has too many. Ask `displaced` afterwards."""
        account = self._accounts.get(key) or self._remembered.get(key) or self._new(key, weight)
        bounds = self.bounds
        if account.num_jobs >= bounds.jobs_of_one or account.num_bytes + num_bytes > bounds.bytes_of_one:
            return None
        if not account.num_jobs:
            self._remembered.pop(key, None)
            self._accounts[key] = account
            passed_s = self._virtual_s - account.left_s
            account.served = max(account.served, self._level, min(account.served + passed_s, self._virtual_s))
        else:
            self._weights -= account.weight
        self._weights += weight
        account.weight = weight
        job = Job(account, num_bytes)
        account.waiting[job] = None
        account.num_jobs += 1
        account.num_bytes += num_bytes
        self._num_jobs += 1
        self._num_bytes += num_bytes
        self._enter(account)
        return job

    def displaced(self) -> Job | None:
        """The job to refuse where all accounts together have too many: of the account with the most waiting the one
        that came last; None where nothing has to be refused."""
        if self._num_jobs <= self.bounds.jobs_of_all and self._num_bytes <= self.bounds.bytes_of_all:
            return None
        by_bytes = self._num_bytes > self.bounds.bytes_of_all
        waiting = (account for account in reversed(self._accounts.values()) if account.waiting)
        largest = max(waiting, key=lambda account: account.num_bytes if by_bytes else account.num_jobs, default=None)
        return None if largest is None else next(reversed(largest.waiting))

    def next(self, now_s: float) -> Job | None:
        """The job that begins now, if one may."""
        if not self.num_free:
            return None
        quick = self._first(self._quick)
        slow = self._first(self._slow) if self._num_slow < self._most_slow else None
        account = min((one for one in (quick, slow) if one), key=lambda one: one.served, default=None)
        if account is None:
            return None
        job, _ = account.waiting.popitem(last=False)
        job.begun_s = now_s
        account.num_held += 1
        self.num_free -= 1
        self._num_slow += account.is_slow
        self._level = max(self._level, account.served)
        self._running[job] = None
        self._enter(account)
        return job

    def outlasts(self, job: Job) -> None:
        """The running job has held its place for longer than a slice."""
        if job.has_outlasted:
            return
        job.has_outlasted = True
        account = job.account
        account.num_outlasting += 1
        if not account.is_slow:
            account.is_slow = True
            self._num_slow += account.num_held
            self._enter(account)

    def recalled(self) -> Job | None:
        """The running job that must give way now, if one must: slow accounts hold all places and another account waits.

        Jobs that gave way before begin as slow ones, so they never hold all places: one of the others outlasts its
        slice, or ends within it.
        """
        if self.num_free or self._num_slow < self.places or self._recalled or not self._first(self._quick):
            return None
        outlasting = (job for job in reversed(self._running) if job.has_outlasted and not job.has_given_way)
        self._recalled = next(outlasting, None)
        if self._recalled is not None:
            self._recalled.has_given_way = True
        return self._recalled

    def wait_again(self, job: Job, now_s: float) -> None:
        """The running job leaves its place. It is the next one of its account."""
        self._leave_place(job, now_s)
        account = job.account
        account.waiting[job] = None
        account.waiting.move_to_end(job, last=False)
        self._enter(account)

    def end(self, job: Job, now_s: float) -> None:
        """The job is over, or is not wanted any more. Ending it twice changes nothing."""
        if job.has_ended:
            return
        job.has_ended = True
        account, was_begun = job.account, job.begun_s is not None
        if was_begun:
            self._leave_place(job, now_s)
        else:
            del account.waiting[job]
        account.num_outlasting -= job.has_outlasted
        if account.is_slow and was_begun and not job.has_outlasted and not account.num_outlasting:
            account.is_slow = False
            self._num_slow -= account.num_held
        account.num_jobs -= 1
        account.num_bytes -= job.num_bytes
        self._num_jobs -= 1
        self._num_bytes -= job.num_bytes
        self._enter(account)
        if account.num_jobs:
            return
        del self._accounts[account.key]
        account.left_s = self._virtual_s
        # From nothing to nothing: rounding errors do not add up.
        self._weights = self._weights - account.weight if self._accounts else 0.0
        if account.served > self._level or account.is_slow:
            self._remembered[account.key] = account
            if len(self._remembered) > MOST_REMEMBERED:
                self._remembered.popitem(last=False)

    def _new(self, key: Hashable, weight: float) -> Account:
        self._virtual_s = max(self._virtual_s, self._level)
        return Account(key, weight, self._virtual_s, left_s=self._virtual_s)

    def _leave_place(self, job: Job, now_s: float) -> None:
        account = job.account
        assert job.begun_s is not None
        account.served += (now_s - job.begun_s) / account.weight
        if not job.has_outlasted:  # for long jobs newcomers need not wait: slow accounts leave a place to them
            self._virtual_s += (now_s - job.begun_s) / max(self._weights, account.weight)
        account.num_held -= 1
        self.num_free += 1
        self._num_slow -= account.is_slow
        job.begun_s = None
        del self._running[job]
        if self._recalled is job:
            self._recalled = None

    def _enter(self, account: Account) -> None:
        """Puts the account into the heap where it belongs now. Its former entries become invalid."""
        account.num_entries += 1
        if not account.waiting or account.num_held >= self.of_one:
            return
        self._num_entries += 1
        heap = self._slow if account.is_slow else self._quick
        heappush(heap, (account.served, self._num_entries, account, account.num_entries))
        if len(heap) > 64 + 2 * len(self._accounts):
            heap[:] = [entry for entry in heap if entry[2].num_entries == entry[3]]
            heapify(heap)

    def _first(self, heap: list[tuple[float, int, Account, int]]) -> Account | None:
        """The account whose turn it is. Invalid entries are dropped."""
        while heap:
            _, _, account, entry = heap[0]
            if account.num_entries == entry:
                return account
            heappop(heap)
        return None
