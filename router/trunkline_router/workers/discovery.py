"""Discovers workers: sources (fixed lists, DNS, leases) name addresses, and the router keeps a link to each of them.

Any program with access to Redis can lease addresses without a worker. So a leased address is tried once and then set
aside with exponential back-off, and no address waits for those that were leased after it.
"""

import asyncio
import contextlib
import heapq
import socket
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence, Set
from math import inf
from random import Random

from trunkline_router.address import DNS_PREFIX
from trunkline_router.workers.health import SHORT_LIFE_S
from trunkline_router.workers.worker_link import ConnectAttempts, WorkerLink
from trunkline_runtime.log import get_logger

ASIDE_FIRST_S, ASIDE_MOST_S = 0.5, 60.0
MOST_REMEMBERED = 4096  # addresses set aside, and addresses that have served; the oldest are forgotten
# Workers known from leases alone: how many may be connected, and how many may be on trial (first connection) at once.
MOST_FOLLOWED, MOST_TRIED = 1024, 64
# Time between the starts of two trials. A failed trial takes a millisecond of CPU time, so trials use at most an eighth
# of a core.
TRY_APART_S, TRY_APART_WHEN_WELL_S = 0.01, 0.002
TRIAL_ANSWERED_AT_MOST_S = 15.0  # to fetch and build a tokenizer, and to open a session
MOST_SHOWN_ASIDE = 64  # leased addresses whose problem is kept; anything that writes to Redis can lease any number
LOOKUP_EVERY_S = (1.0, 2.0)  # drawn at random each time, so that routers do not look up at the same moment

Addresses = frozenset[str]  # of host:port, or [IPv6]:port
# Yields all its addresses whenever they change. After a source ends, its last addresses stay valid.
Source = AsyncIterator[Addresses]
Resolve = Callable[[str, int], Awaitable[Addresses]]  # takes a name and a port; raises OSError
Sleep = Callable[[float], Awaitable[None]]


def sources_of(workers: Sequence[str], rng: Random) -> tuple[list[Source], list[ConnectAttempts]]:
    """Returns the sources for the entries of --workers (one for all fixed addresses, one per DNS name) and the
    connect attempts of the DNS lookups."""
    names = [entry.removeprefix(DNS_PREFIX) for entry in workers if entry.startswith(DNS_PREFIX)]
    listed = [entry for entry in workers if not entry.startswith(DNS_PREFIX)]
    lookups = [ConnectAttempts() for _ in names]
    looked_up = [
        watch_name(name.rpartition(":")[0], int(name.rpartition(":")[2]), rng, sleep=lookup.pause)
        for name, lookup in zip(names, lookups, strict=True)
    ]
    return [*([fixed(listed)] if listed else []), *looked_up], lookups


async def fixed(addresses: Iterable[str]) -> Source:
    """A list that never changes."""
    yield frozenset(addresses)


async def resolve_name(name: str, port: int) -> Addresses:
    """Returns the IPv4 addresses of a name, or the IPv6 addresses if there are none. Raises OSError.

    Not both, because a dual-stack service has two addresses for every worker, which would count as two workers.
    """
    host = name.removeprefix("[").removesuffix("]")
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    families = {family for family, *_ in found}
    family = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
    hosts = {str(address[0]) for known, _, _, _, address in found if known == family}
    return frozenset(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts)


async def watch_name(
    name: str, port: int, rng: Random, resolve: Resolve = resolve_name, sleep: Sleep = asyncio.sleep
) -> Source:
    """Looks up the addresses of a name until cancelled. While lookups fail, the known addresses stay valid."""
    log = get_logger()
    known: Addresses | None = None
    last_problem = ""
    while True:
        problem = ""
        try:
            addresses = await resolve(name, port)
        except OSError as error:  # includes an unknown name: that of a headless service without a ready worker
            problem = error.strerror or str(error)
        else:
            if addresses != known:
                known = addresses
                yield addresses
        if problem and problem != last_problem:  # one line per change, not per lookup
            log.warning("workers cannot be looked up", name=name, problem=problem, known=len(known or ()))
        last_problem = problem
        await sleep(rng.uniform(*LOOKUP_EVERY_S))


class LeaseQueue:
    """Leased addresses in the order of their trials. An address that has served before may be tried at once, a new one
    after those that were leased before it, and one that failed when its pause is over. Pauses double."""

    def __init__(self) -> None:
        self._leased: set[str] = set()  # leased addresses without a link
        self._due: dict[str, tuple[float, int, str]] = {}  # the next trial: its time, a number and the address
        self._heap: list[tuple[float, int, str]] = []  # of these, and outdated ones
        self._number = 0
        self._pauses: OrderedDict[str, tuple[float, str]] = OrderedDict()  # of failed ones, with failed()'s `holder`
        self._served: OrderedDict[str, None] = OrderedDict()

    @property
    def num_aside(self) -> int:
        """Number of addresses that are set aside."""
        return len(self._pauses)

    @property
    def num_waiting(self) -> int:
        """Number of leased addresses without a link."""
        return len(self._leased)

    def lease(self, leased: Set[str], now_s: float) -> None:
        """Sets the leased addresses to which the router has no link."""
        self._leased = set(leased)
        for address in self._due.keys() - leased - self._pauses.keys():
            del self._due[address]
        for address in sorted(leased - self._due.keys()):
            self._set(address, -inf if address in self._served else now_s)

    def next(self, now_s: float) -> str | None:
        """Removes and returns the address to try now, or None if there is none."""
        if self.due_in_s(now_s) > 0:
            return None
        _, _, address = heapq.heappop(self._heap)
        del self._due[address]
        self._leased.discard(address)
        return address

    def due_in_s(self, now_s: float) -> float:
        """Seconds until the next trial; infinite if there is none."""
        while self._heap:
            due_s, _, address = entry = self._heap[0]
            is_present = self._due.get(address) is entry
            if is_present and (due_s > now_s or address in self._leased):
                return due_s - now_s
            heapq.heappop(self._heap)
            if is_present:  # its lease has ended
                del self._due[address]
                self._pauses.pop(address, None)
        return inf

    def failed(self, address: str, now_s: float, holder: str = "") -> None:
        """Sets the address aside because no worker could be connected there, or because the same worker is already
        connected at the address `holder`."""
        before_s, _ = self._pauses.pop(address, (ASIDE_FIRST_S / 2, ""))
        pause_s = min(2 * before_s, ASIDE_MOST_S)
        self._served.pop(address, None)
        self._pauses[address] = (pause_s, holder)
        if len(self._pauses) > MOST_REMEMBERED:
            self._pauses.popitem(last=False)
        self._set(address, now_s + pause_s)

    def served(self, address: str) -> None:
        """Records that a worker was connected at the address for a while."""
        self._pauses.pop(address, None)
        self._served[address] = None
        self._served.move_to_end(address)
        if len(self._served) > MOST_REMEMBERED:
            self._served.popitem(last=False)

    def lost(self, holder: str) -> None:
        """Records that the connection to the worker at `holder` has ended. Its other addresses may be tried at once."""
        for address in [address for address, (_, held_by) in self._pauses.items() if held_by == holder]:
            del self._pauses[address]
            if address in self._leased:
                self._set(address, -inf)

    def _set(self, address: str, due_s: float) -> None:
        self._number += 1
        self._due[address] = entry = (due_s, self._number, address)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 64 + 2 * len(self._due):
            self._heap = list(self._due.values())
            heapq.heapify(self._heap)


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
        self._queue.lease(self._leased - self._by_address.keys(), self._clock_s())
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
                              waiting=self._queue.num_waiting, address=link.address, problem=link.problem)  # fmt: skip
