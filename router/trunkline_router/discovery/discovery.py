"""Which workers there are. Sources name addresses, each in its own way; the router has a link to every one of them."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from math import inf
from random import Random

from trunkline_router.discovery.address import DNS_PREFIX
from trunkline_router.discovery.lease_queue import LeaseQueue
from trunkline_router.workers.connect_attempts import ConnectAttempts
from trunkline_router.workers.worker_breaker import SHORT_LIFE_S
from trunkline_router.workers.worker_link import WorkerLink
from trunkline_runtime.log import get_logger

LOOKUP_EVERY_S = (1.0, 2.0)  # drawn anew each time, so that routers do not ask in step

# Workers that leases alone speak for: how many may be connected, and be tried to connect for the first time at once.
MOST_FOLLOWED, MOST_TRIED = 1024, 64
# From the beginning of one such try to the next. A try that fails takes a millisecond of processor time: this bounds
# them to an eighth of it.
TRY_APART_S, TRY_APART_WHEN_WELL_S = 0.01, 0.002
TRIAL_ANSWERED_AT_MOST_S = 15.0  # to fetch and build a tokenizer, and to open a session

Addresses = frozenset[str]  # of host:port, or [IPv6]:port
# Yields all addresses that it knows of, whenever they change. One that ends goes on to stand for what it said last.
Source = AsyncIterator[Addresses]
Resolve = Callable[[str, int], Awaitable[Addresses]]  # of a name and a port; raises OSError
Sleep = Callable[[float], Awaitable[None]]


def sources_of(workers: Sequence[str], rng: Random) -> tuple[list[Source], list[ConnectAttempts]]:
    """What --workers names: the fixed ones, and each name to look up; and the lookups."""
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
    """The addresses of a name: IPv4 where it has any, else IPv6. Raises OSError.

    Not both, because a service of two families gives every worker one address of each, and it would be two workers.
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
    """The addresses that a name has, looked up for ever. While a lookup fails, those that were known stay."""
    log = get_logger()
    known: Addresses | None = None
    last_problem = ""
    while True:
        problem = ""
        try:
            addresses = await resolve(name, port)
        except OSError as error:  # or the name is unknown: that of a headless service without a ready worker is
            problem = error.strerror or str(error)
        else:
            if addresses != known:
                known = addresses
                yield addresses
        if problem and problem != last_problem:  # one line per change, not per lookup
            log.warning("workers cannot be looked up", name=name, problem=problem, known=len(known or ()))
        last_problem = problem
        await sleep(rng.uniform(*LOOKUP_EVERY_S))


class Membership:
    """Keeps `links` equal to what the sources name together, and to leased workers that have been connected, and the
    links running.

    A worker that no source names any more may have streams to finish: its link ends with its connection, not before.

    A lease is no more than a hint. The workers that are known by leases alone are tried a few at a time, MOST_TRIED of
    them at once and one in a turn of the event loop. A link is kept for those that could be connected, MOST_FOLLOWED at
    most, as long as their leases last and their connections do not break young. A worker that comes after n leases that
    lead nowhere is tried within n / 60 seconds and one more; after n that answer and then say nothing, within
    n * TRIAL_ANSWERED_AT_MOST_S / MOST_TRIED.
    """

    def __init__(
        self,
        links: list[WorkerLink],
        connect: Callable[[str], WorkerLink],
        clock_s: Callable[[], float] = time.monotonic,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self._links = links
        self._connect = connect
        self._clock_s = clock_s
        self._sleep = sleep
        self._named: dict[int, Addresses] = {}  # by source
        self._leased: Addresses = frozenset()
        self._by_address: dict[str, WorkerLink] = {}
        self._queue = LeaseQueue()
        self._queue_changed = asyncio.Event()
        self._trials = 0  # links on trial
        self._followed = 0  # links that leases alone speak for, and that have been on trial
        self._said_aside = 0  # leases, when it was last logged how many were set aside
        self._log = get_logger()

    async def run(self, sources: Sequence[Source], leases: Source | None = None) -> None:
        """Until it is cancelled. Raises what a bug in a source or a link raises.

        `leases` are the workers that any router of the fleet has a lease of. They are wanted as long as it lasts, and
        no source names them: a router renews no lease for the lease's own sake, or none would ever end.
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
        self._update(tasks)  # it may have been named again as it ended

    async def _try_leased(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            tasks.create_task(self._try(await self._next(), tasks))
            # Each try takes about a millisecond of the loop to begin.
            await self._sleep(TRY_APART_S if self._queue.num_aside else TRY_APART_WHEN_WELL_S)

    async def _next(self) -> WorkerLink:
        """A link to the leased worker that is to be tried, once there is one and a place for it."""
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
            await asyncio.wait({running})  # a source has come to name it, and now it is tried for ever
            has_failed = False
        for task in (running, following):
            task.cancel()
        await asyncio.wait({running, following})
        if has_failed:
            self._queue.failed(link.address, self._clock_s(), holder)
            self._say_aside(link)
        self._end_trial(link)
        self._followed -= 1
        self._remove(link, tasks)

    async def _follow_one(self, link: WorkerLink) -> None:
        """Returns when there is no worker to connect, or its connection has broken young."""
        while await link.connect_attempts.outcome(TRIAL_ANSWERED_AT_MOST_S):
            self._end_trial(link)
            since_s = self._clock_s()
            await link.connect_attempts.next()
            if self._clock_s() - since_s < SHORT_LIFE_S:
                return
            self._queue.served(link.address)

    def _end_trial(self, link: WorkerLink) -> None:
        """It makes room for another one, and counts as one that is followed."""
        if link.is_on_trial:
            link.is_on_trial = False
            self._trials -= 1
            self._followed += 1
            self._queue_changed.set()

    def _say_aside(self, link: WorkerLink) -> None:
        """Once, and again whenever they have become twice as many."""
        if self._queue.num_aside >= 2 * self._said_aside:
            self._said_aside = max(1, self._queue.num_aside)
            self._log.warning("leased workers cannot be connected", set_aside=self._queue.num_aside,
                              waiting=len(self._queue), address=link.address, problem=link.problem)  # fmt: skip
