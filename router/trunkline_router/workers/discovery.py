"""Discovers workers: sources (fixed lists, DNS, leases) name addresses, and the router keeps a link to each of them."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Iterable, Sequence, Set
from dataclasses import dataclass
from math import inf
from random import Random

from trunkline_router.address import DNS_PREFIX
from trunkline_router.workers.breaker import SHORT_LIFE_S
from trunkline_router.workers.pool import Pools
from trunkline_router.workers.pool_search import ConnectAttempts
from trunkline_router.workers.worker_link import WorkerLink
from trunkline_runtime.log import get_logger

ASIDE_FIRST_S, ASIDE_MOST_S = 0.5, 60.0
# Links to workers known from leases alone, and those of them that are on trial: not connected yet.
MOST_FOLLOWED, MOST_TRIED = 1024, 64
# Between the starts of two trials. A failed one takes a millisecond of CPU time, so trials use at most an eighth of a
# core.
TRY_APART_S = 0.01
LEASES_EVERY_S = 0.1  # how often leases are looked at while none is due
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


@dataclass(slots=True)
class _Lease:
    due_s: float  # of its next trial
    pause_s: float = ASIDE_FIRST_S  # after the next failure
    holder: str = ""  # the address at which the same worker is connected already


class LeaseQueue:
    """When to try each leased address: one that has served at once, a new one after those that were leased before it,
    and one that failed when its pause is over. Pauses double. Addresses whose leases end are forgotten."""

    def __init__(self) -> None:
        self._leases: dict[str, _Lease] = {}

    @property
    def num_aside(self) -> int:
        """Number of addresses whose last trial failed."""
        return sum(lease.pause_s > ASIDE_FIRST_S for lease in self._leases.values())

    def lease(self, leased: Set[str], now_s: float) -> None:
        """Sets the leased addresses."""
        self._leases = {address: self._leases.get(address) or _Lease(now_s) for address in sorted(leased)}

    def next(self, now_s: float, linked: Container[str]) -> str | None:
        """Returns the address to try now, without the linked ones; None if there is none."""
        due = {address: lease.due_s for address, lease in self._leases.items() if lease.due_s <= now_s}
        return min((address for address in due if address not in linked), key=due.__getitem__, default=None)

    def failed(self, address: str, now_s: float, holder: str = "") -> None:
        """No worker could be connected there, or the same one is connected at the address `holder`."""
        if (lease := self._leases.get(address)) is not None:
            lease.due_s, lease.holder = now_s + lease.pause_s, holder
            lease.pause_s = min(2 * lease.pause_s, ASIDE_MOST_S)

    def served(self, address: str) -> None:
        """A worker was connected there for a while."""
        if address in self._leases:
            self._leases[address] = _Lease(-inf)

    def lost(self, holder: str) -> None:
        """The connection at `holder` has ended: other addresses of its worker may be tried at once."""
        for address, lease in self._leases.items():
            if lease.holder == holder:
                self._leases[address] = _Lease(-inf)


class Membership:
    """Keeps the links of the pools equal to the workers that the sources name plus the leased workers that could be
    connected, and runs them. `Pools.set_aside` has the problems of the last MOST_SHOWN_ASIDE that could not be.

    A worker that no source names any more may have streams to finish, so its link ends only with its connection.

    A lease is only a hint: any program with access to Redis can lease addresses without a worker. Workers known from
    leases alone are tried at most MOST_TRIED at once, one per TRY_APART_S, and at most MOST_FOLLOWED of them have
    links, each for one connection. A worker behind n leases without a worker is tried within n / 60 seconds plus one
    second; behind n that answer and then fall silent, within n * TRIAL_AT_MOST_S / MOST_TRIED.
    """

    def __init__(self, pools: Pools, connect: Callable[[str], WorkerLink]) -> None:
        self._links, self._set_aside = pools.links, pools.set_aside
        self._connect = connect
        self._named: dict[int, Addresses] = {}  # by source
        self._leased: Addresses = frozenset()
        self._by_address: dict[str, WorkerLink] = {}
        self._queue = LeaseQueue()
        self._logged_aside = 0  # the last logged number of leases set aside
        self._log = get_logger()

    async def run(self, sources: Sequence[Source], leases: Source | None = None) -> None:
        """Runs until cancelled. An exception from a source or a link is a bug and propagates.

        leases: the workers that any router of the fleet holds a lease for. They do not count as named by a source:
            routers renew leases only for named workers, or leases would never end
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
            self._queue.lease(addresses, time.monotonic())
            self._update(tasks)

    def _update(self, tasks: asyncio.TaskGroup) -> None:
        named: Addresses = frozenset().union(*self._named.values())
        members = named | self._leased
        for address, link in self._by_address.items():
            if link.wanted and address not in members and not link.is_on_trial:
                self._log.info("worker no longer named", address=address)
            link.wanted, link.is_named = address in members, address in named
            link.is_on_trial &= not link.is_named
        for address in sorted(named - self._by_address.keys()):
            tasks.create_task(self._run(self._add(address), tasks))
        for address in self._set_aside.keys() - (self._leased - named):
            del self._set_aside[address]

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
            link = self._next_trial()
            if link is not None:
                tasks.create_task(self._try(link, tasks))
            await asyncio.sleep(LEASES_EVERY_S if link is None else TRY_APART_S)

    def _next_trial(self) -> WorkerLink | None:
        """Returns a link to a leased worker that may be tried now."""
        followed = [link for link in self._links if not link.is_named]
        if len(followed) >= MOST_FOLLOWED or sum(link.is_on_trial for link in followed) >= MOST_TRIED:
            return None
        address = self._queue.next(time.monotonic(), self._by_address)
        if address is None:
            return None
        link = self._add(address)
        link.is_named, link.is_on_trial = False, True
        return link

    async def _try(self, link: WorkerLink, tasks: asyncio.TaskGroup) -> None:
        """Connects a leased worker once. The queue decides when it is tried again."""
        lasted_s = await link.connect()
        self._set_aside.pop(link.address, None)
        if link.is_named:  # a source names it now, so it is tried without limit
            await link.run()
        elif lasted_s >= SHORT_LIFE_S:
            self._queue.served(link.address)
        elif link.wanted:
            self._set_apart(link)
        self._remove(link, tasks)

    def _set_apart(self, link: WorkerLink) -> None:
        holder = link.same_as.address if link.same_as is not None else ""
        self._queue.failed(link.address, time.monotonic(), holder)
        if not holder:
            self._set_aside[link.address] = link.problem
            if len(self._set_aside) > MOST_SHOWN_ASIDE:
                del self._set_aside[next(iter(self._set_aside))]
        num_aside = self._queue.num_aside
        if num_aside >= 2 * self._logged_aside:  # a line whenever their number has doubled
            self._logged_aside = max(1, num_aside)
            self._log.warning(
                "leased workers cannot be connected", set_aside=num_aside, address=link.address, problem=link.problem
            )
