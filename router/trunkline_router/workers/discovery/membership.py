"""Discovers workers: sources (fixed lists, DNS, leases) name addresses, and the router keeps a link to each of them."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from math import inf

from trunkline_router.workers.discovery.address_sources import Addresses, Sleep, Source
from trunkline_router.workers.discovery.lease_queue import LeaseQueue
from trunkline_router.workers.worker_breaker import SHORT_LIFE_S
from trunkline_router.workers.worker_link import WorkerLink
from trunkline_runtime.log import get_logger

# Workers known from leases alone: how many may be connected, and how many may be on trial (first connection) at once.
MOST_FOLLOWED, MOST_TRIED = 1024, 64
# Time between the starts of two trials. A failed trial takes a millisecond of CPU time, so trials use at most an eighth
# of a core.
TRY_APART_S, TRY_APART_WHEN_WELL_S = 0.01, 0.002
TRIAL_ANSWERED_AT_MOST_S = 15.0  # to fetch and build a tokenizer, and to open a session
MOST_SHOWN_ASIDE = 64  # leased addresses whose problem is kept; anything that writes to Redis can lease any number


class Membership:
    """Keeps `links` equal to the workers that the sources name plus the leased workers that could be connected, and
    runs the links. `set_aside` has the problem of leased ones that could not be, of the last MOST_SHOWN_ASIDE.

    A worker that no source names any more may have streams to finish, so its link ends only with its connection.

    A lease is only a hint. Workers known from leases alone are tried at most MOST_TRIED at once, one per turn of the
    event loop. Those that could be connected, at most MOST_FOLLOWED, keep a link as long as their leases last and their
    connections do not break early. A worker behind n leases without a worker is tried within n / 60 seconds plus one
    second; behind n that answer and then fall silent, within n * TRIAL_ANSWERED_AT_MOST_S / MOST_TRIED.
    """

    def __init__(
        self,
        links: list[WorkerLink],
        connect: Callable[[str], WorkerLink],
        clock_s: Callable[[], float] = time.monotonic,
        sleep: Sleep = asyncio.sleep,
        *,
        set_aside: dict[str, str],
    ) -> None:
        self._links = links
        self._set_aside = set_aside
        self._connect = connect
        self._clock_s = clock_s
        self._sleep = sleep
        self._named: dict[int, Addresses] = {}  # by source
        self._leased: Addresses = frozenset()
        self._by_address: dict[str, WorkerLink] = {}
        self._queue = LeaseQueue()
        self._queue_changed = asyncio.Event()
        self._trials = 0  # links on trial
        self._followed = 0  # links known from leases alone that have passed their trial
        self._logged_aside = 0  # the last logged number of leases set aside
        self._log = get_logger()

    async def run(self, sources: Sequence[Source], leases: Source | None = None) -> None:
        """Runs until cancelled. An exception from a source or a link is a bug and propagates.

        `leases` are the workers that any router of the fleet holds a lease for. They are wanted as long as the lease
        lasts but do not count as named by a source: routers renew leases only for named workers, or leases would never
        end.
        """
        async with asyncio.TaskGroup() as tasks:
            if leases is not None:
                tasks.create_task(self._follow_leases(leases, tasks))
                tasks.create_task(self._try_leased(tasks))
            for number, source in enumerate(sources):
                tasks.create_task(self._follow(number, source, tasks))

    async def _follow(self, number: int, source: Source, tasks: asyncio.TaskGroup) -> None:
        async for addresses in source:
            self._named[number] = addresses
            self._update(tasks)

    async def _follow_leases(self, leases: Source, tasks: asyncio.TaskGroup) -> None:
        async for addresses in leases:
            self._leased = addresses
            self._update(tasks)

    def _update(self, tasks: asyncio.TaskGroup) -> None:
        named: Addresses = frozenset().union(*self._named.values())
        members = named | self._leased
        for address, link in self._by_address.items():
            if link.wanted and address not in members and not link.is_on_trial:
                self._log.info("worker no longer named", address=address)
            link.wanted, link.is_named = address in members, address in named
        for address in sorted(named - self._by_address.keys()):
            link = self._add(address)
            link.is_named = True
            tasks.create_task(self._run(link, tasks))
        for address in self._set_aside.keys() - (self._leased - named):
            del self._set_aside[address]
        self._queue.lease(self._leased - self._by_address.keys())
        self._queue_changed.set()

    def _add(self, address: str) -> WorkerLink:
        link = self._connect(address)
        self._by_address[address] = link
        self._links.append(link)
        return link

    async def _run(self, link: WorkerLink, tasks: asyncio.TaskGroup) -> None:
        await link.run()
        self._remove(link, tasks)

    def _remove(self, link: WorkerLink, tasks: asyncio.TaskGroup) -> None:
        self._links.remove(link)
        del self._by_address[link.address]
        self._queue.lost(link.address)
        self._update(tasks)  # a source may have named it again meanwhile

    async def _try_leased(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            tasks.create_task(self._try(await self._next(), tasks))
            # Starting a trial takes about a millisecond of the event loop.
            await self._sleep(TRY_APART_S if self._queue.num_aside else TRY_APART_WHEN_WELL_S)

    async def _next(self) -> WorkerLink:
        """Waits until there is a leased worker to try and a place for it, and returns a link to it."""
        while True:
            self._queue_changed.clear()
            wait_s = inf
            if self._trials < MOST_TRIED and self._trials + self._followed < MOST_FOLLOWED:
                now_s = self._clock_s()
                address = self._queue.next(now_s)
                if address is not None:
                    self._trials += 1
                    link = self._add(address)
                    link.is_named, link.is_on_trial = False, True
                    return link
                wait_s = self._queue.due_in_s(now_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if wait_s == inf else wait_s):
                    await self._queue_changed.wait()

    async def _try(self, link: WorkerLink, tasks: asyncio.TaskGroup) -> None:
        running = tasks.create_task(link.run())
        following = tasks.create_task(self._follow_one(link))
        await asyncio.wait({running, following}, return_when=asyncio.FIRST_COMPLETED)
        holder = link.same_as.address if link.same_as is not None else ""
        has_failed = not running.done()
        if has_failed and link.is_named:
            self._end_trial(link)
            await asyncio.wait({running})  # a source names it now, so it is retried without limit
            has_failed = False
        for task in (running, following):
            task.cancel()
        await asyncio.wait({running, following})
        if has_failed:
            self._queue.failed(link.address, self._clock_s(), holder)
            self._set_aside.pop(link.address, None)
            if not holder:
                self._set_aside[link.address] = link.problem
                if len(self._set_aside) > MOST_SHOWN_ASIDE:
                    del self._set_aside[next(iter(self._set_aside))]
            self._log_aside(link)
        self._end_trial(link)
        self._followed -= 1
        self._remove(link, tasks)

    async def _follow_one(self, link: WorkerLink) -> None:
        """Returns when no worker could be connected or its connection has broken early."""
        while await link.connect_attempts.outcome(TRIAL_ANSWERED_AT_MOST_S):
            self._end_trial(link)
            since_s = self._clock_s()
            await link.connect_attempts.next()
            if self._clock_s() - since_s < SHORT_LIFE_S:
                return
            self._queue.served(link.address)

    def _end_trial(self, link: WorkerLink) -> None:
        """Ends the link's trial, which makes room for another one. The link then counts as followed."""
        if link.is_on_trial:
            link.is_on_trial = False
            if link.worker is not None:
                self._set_aside.pop(link.address, None)
            self._trials -= 1
            self._followed += 1
            self._queue_changed.set()

    def _log_aside(self, link: WorkerLink) -> None:
        """Logs the number of leases set aside, and again whenever it has doubled."""
        if self._queue.num_aside >= 2 * self._logged_aside:
            self._logged_aside = max(1, self._queue.num_aside)
            self._log.warning("leased workers cannot be connected", set_aside=self._queue.num_aside,
                              waiting=len(self._queue), address=link.address, problem=link.problem)  # fmt: skip
