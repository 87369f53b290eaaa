"""Sources of worker addresses: fixed lists and names that DNS resolves."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from random import Random

from trunkline_router.address import DNS_PREFIX
from trunkline_router.workers.connect_attempts import ConnectAttempts
from trunkline_runtime.log import get_logger

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
