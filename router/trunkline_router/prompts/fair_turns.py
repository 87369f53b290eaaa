"""The order in which accounts use a few places. Pure: time is passed in.

- Accounts are served in the order of the time for which they have held places, divided by their weight (start-time fair
  queueing: Goyal, Vin and Cheng, SIGCOMM 1996). One account never holds more than `of_one` places.
- A new account starts at virtual time: the service of an account that always had a job (generalised processor sharing:
  Parekh and Gallager, 1993). A returning account catches up for the time in which it had no job. Otherwise single jobs
  under many names would always go before another account.
- A job that holds its place for longer than a slice makes its account slow. The account stays slow until all such jobs
  have ended and one of its jobs has ended within a slice. Slow accounts together leave one place to the others.
- When several accounts become slow at once and hold all places, one job gives way: among those that outlasted their
  slice, the last to begin. It waits for another turn. A job gives way only once.

So a job of an account that is not slow waits for at most one slice of each other account with jobs at that time, and
until the others have caught up with the service of its own account.
"""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

MAX_REMEMBERED = 1024  # accounts without jobs that are slow or have had more than their share


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits on the number and bytes of waiting and running jobs, of one account and of all."""

    jobs_of_one: int
    jobs_of_all: int
    bytes_of_one: int
    bytes_of_all: int


@dataclass(slots=True, eq=False)
class Account:
    """An account, such as a tenant, that takes turns with others."""

    key: Hashable
    weight: float
    served: float  # seconds of held places divided by the weight, plus the level at which it joined
    waiting: "OrderedDict[Job, None]" = field(default_factory=OrderedDict)
    num_jobs: int = 0  # waiting and running
    num_bytes: int = 0  # of these jobs
    num_held: int = 0  # places
    num_outlasting: int = 0  # jobs that outlasted a slice, running or waiting again
    is_slow: bool = False
    num_entries: int = 0  # heap entries so far, of which only the last is valid
    left_s: float = 0.0  # virtual time at which its last job ended


@dataclass(slots=True, eq=False)
class Job:
    """A job, from joining to its end."""

    account: Account
    num_bytes: int
    begun_s: float | None = None  # None while it waits
    has_outlasted: bool = False
    has_ended: bool = False
    has_given_way: bool = False  # also while it is recalled and has not left its place yet


class FairTurns:
    """Decides which job gets one of `places` places. One account holds at most `of_one`. Both are at least 1."""

    def __init__(self, places: int, of_one: int, bounds: Bounds) -> None:
        self.places, self.of_one, self.bounds = places, of_one, bounds
        self.num_free = places
        self._max_slow = max(1, places - 1)  # all accounts share a single place
        self._num_slow = 0  # places held by slow accounts
        self._num_jobs = 0
        self._num_bytes = 0
        self._level = 0.0  # `served` of the account whose job began last: the minimum for returning accounts
        self._virtual_s = 0.0  # virtual time: the minimum for new accounts
        self._weights = 0.0  # sum over the accounts with jobs
        self._accounts: OrderedDict[Hashable, Account] = OrderedDict()
        self._remembered: OrderedDict[Hashable, Account] = OrderedDict()  # without jobs
        self._quick: list[tuple[float, int, Account, int]] = []  # heaps of accounts that wait and may take a place
        self._slow: list[tuple[float, int, Account, int]] = []
        self._num_entries = 0
        self._running: OrderedDict[Job, None] = OrderedDict()  # in the order in which they began
        self._recalled: Job | None = None  # the job that was told to give way, until it leaves its place

    @property
    def is_idle(self) -> bool:
        """Whether no job is waiting or running."""
        return not self._num_jobs

    def join(self, key: Hashable, num_bytes: int, weight: float) -> Job | None:
        """Queues and returns a new job, or returns None if its account is at its limit. Call `displaced` afterwards."""
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
        """The job to refuse if all accounts together are over the limit, else None. It is the newest waiting job of
        the account with the most jobs or bytes."""
        if self._num_jobs <= self.bounds.jobs_of_all and self._num_bytes <= self.bounds.bytes_of_all:
            return None
        by_bytes = self._num_bytes > self.bounds.bytes_of_all
        waiting = (account for account in reversed(self._accounts.values()) if account.waiting)
        largest = max(waiting, key=lambda account: account.num_bytes if by_bytes else account.num_jobs, default=None)
        return None if largest is None else next(reversed(largest.waiting))

    def next(self, now_s: float) -> Job | None:
        """Takes the job that begins now out of the queue. Returns None if no job may begin."""
        if not self.num_free:
            return None
        quick = self._first(self._quick)
        slow = self._first(self._slow) if self._num_slow < self._max_slow else None
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
        """Records that the running job has held its place for longer than a slice."""
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
        """The running job that must give way because slow accounts hold all places and another account waits, or None.

        Jobs that gave way before begin as jobs of slow accounts, so they never hold all places. One of the other jobs
        outlasts its slice or ends within it.
        """
        if self.num_free or self._num_slow < self.places or self._recalled or not self._first(self._quick):
            return None
        outlasting = (job for job in reversed(self._running) if job.has_outlasted and not job.has_given_way)
        self._recalled = next(outlasting, None)
        if self._recalled is not None:
            self._recalled.has_given_way = True
        return self._recalled

    def wait_again(self, job: Job, now_s: float) -> None:
        """Takes the running job from its place and puts it first in its account's queue."""
        self._leave_place(job, now_s)
        account = job.account
        account.waiting[job] = None
        account.waiting.move_to_end(job, last=False)
        self._enter(account)

    def end(self, job: Job, now_s: float) -> None:
        """Ends a job that is over or was cancelled. Ending it twice changes nothing."""
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
        # Starts from 0 again whenever no account has jobs, so that rounding errors do not add up.
        self._weights = self._weights - account.weight if self._accounts else 0.0
        if account.served > self._level or account.is_slow:
            self._remembered[account.key] = account
            if len(self._remembered) > MAX_REMEMBERED:
                self._remembered.popitem(last=False)

    def _new(self, key: Hashable, weight: float) -> Account:
        self._virtual_s = max(self._virtual_s, self._level)
        return Account(key, weight, self._virtual_s, left_s=self._virtual_s)

    def _leave_place(self, job: Job, now_s: float) -> None:
        account = job.account
        assert job.begun_s is not None
        account.served += (now_s - job.begun_s) / account.weight
        if not job.has_outlasted:  # new accounts need not wait for long jobs: slow accounts leave a place to them
            self._virtual_s += (now_s - job.begun_s) / max(self._weights, account.weight)
        account.num_held -= 1
        self.num_free += 1
        self._num_slow -= account.is_slow
        job.begun_s = None
        del self._running[job]
        if self._recalled is job:
            self._recalled = None

    def _enter(self, account: Account) -> None:
        """Puts the account into the heap where it belongs now. Its previous entries become invalid."""
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
        """The account whose turn it is, or None. Drops invalid entries."""
        while heap:
            _, _, account, entry = heap[0]
            if account.num_entries == entry:
                return account
            heappop(heap)
        return None
