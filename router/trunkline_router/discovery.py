"""Which workers there are. Sources name addresses, each in its own way; the router has a link to every one of them."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from random import Random

from trunkline_router.settings import DNS_PREFIX
from trunkline_router.tries import Tries
from trunkline_router.worker_link import WorkerLink
from trunkline_runtime.log import get_logger

LOOKUP_EVERY_S = (1.0, 2.0)  # drawn anew each time, so that routers do not ask in step

Addresses = frozenset[str]  # of host:port, or [IPv6]:port
# Yields all addresses that it knows of, whenever they change. One that ends goes on to stand for what it said last.
Source = AsyncIterator[Addresses]
Resolve = Callable[[str, int], Awaitable[Addresses]]  # of a name and a port; raises OSError
Sleep = Callable[[float], Awaitable[None]]


def sources_of(workers: Sequence[str], rng: Random) -> tuple[list[Source], list[Tries]]:
    """What --workers names: the fixed ones, and each name to look up; and the lookups."""
    names = [entry.removeprefix(DNS_PREFIX) for entry in workers if entry.startswith(DNS_PREFIX)]
    listed = [entry for entry in workers if not entry.startswith(DNS_PREFIX)]
    lookups = [Tries() for _ in names]
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
        except OSError as error:  # a name that nobody has, too: a headless service without a ready worker is one
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
    """Keeps `links` equal to what the sources name together, and the links running.

    A worker that nobody names any more may have streams to finish: its link ends with its connection, not before.
    """

    def __init__(self, links: list[WorkerLink], connect: Callable[[str], WorkerLink]) -> None:
        self._links = links
        self._connect = connect
        self._named: dict[int, Addresses] = {}  # by source
        self._leased: Addresses = frozenset()
        self._by_address: dict[str, WorkerLink] = {}
        self._log = get_logger()

    async def run(self, sources: Sequence[Source], leases: Source | None = None) -> None:
        """Until it is cancelled. Raises what a bug in a source or a link raises.

        `leases` are the workers that any router of the fleet has a lease of. They are wanted as long as it lasts, and
        no source names them: a router renews no lease for the lease's own sake, or none would ever end.
        """
        async with asyncio.TaskGroup() as tasks:
            if leases is not None:
                tasks.create_task(self._follow_leases(leases, tasks))
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
        named = frozenset().union(*self._named.values())
        members = named | self._leased
        for address, link in self._by_address.items():
            if link.wanted and address not in members:
                self._log.info("worker no longer named", address=address)
            link.wanted, link.is_named = address in members, address in named
        for address in sorted(members - self._by_address.keys()):
            link = self._connect(address)
            link.is_named = address in named
            self._by_address[address] = link
            self._links.append(link)
            tasks.create_task(self._run(link, tasks))

    async def _run(self, link: WorkerLink, tasks: asyncio.TaskGroup) -> None:
        await link.run()
        self._links.remove(link)
        del self._by_address[link.address]
        self._update(tasks)  # it may have been named again as it ended
