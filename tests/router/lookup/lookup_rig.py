"""Routers that share a Redis and ask each other for their requests."""

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random
from typing import Any

from tests.router.cluster import PATIENCE_S, Cluster, cluster, until
from tests.router.fake_worker import FakeWorker
from trunkline.grant import GrantKeys
from trunkline_router.access.identity.fleet_secret import FleetSecret
from trunkline_router.observe.lookup.request_book import RequestBook
from trunkline_router.observe.lookup.router_lookup import RouterLookup
from trunkline_router.observe.lookup.sealed_messages import MessageSeal, message_seal
from trunkline_router.quotas.shared_state.pool_fleet import PoolFleet
from trunkline_router.quotas.shared_state.state import SharedState
from trunkline_router.quotas.stores.redis_store import RedisStore
from trunkline_router.workers.pool import Pools

SECRET, OTHER_SECRET = b"a fleet secret of thirty-two bytes", b"another secret of thirty-two bytes"
NUMBERS = itertools.count()


def new_prefix() -> str:
    """Of a fleet of one test."""
    return f"lookup-{next(NUMBERS)}:"


def seal_of(url: str, prefix: str, *secrets: bytes) -> MessageSeal:
    """The seal of a fleet with these secrets, the current one first."""
    seal = message_seal(FleetSecret(secrets[0], secrets[1:]), GrantKeys(), url, prefix)
    assert seal is not None
    return seal


def seal_of_grant_keys(url: str, prefix: str, *keys: bytes) -> MessageSeal:
    """The seal of a fleet without a secret whose routers have these grant keys, the newest one first."""
    seal = message_seal(FleetSecret(), GrantKeys(*keys), url, prefix)
    assert seal is not None
    return seal


def sharing(url: str, prefix: str, name: str) -> Callable[[Pools, Random], SharedState]:
    """Makes what a router shares through Redis."""

    def share(pools: Pools, rng: Random) -> SharedState:
        store = RedisStore(url, prefix, patience_s=PATIENCE_S)
        return SharedState(store, name, PoolFleet(pools), rng, patience_s=PATIENCE_S)

    return share


def looking_up(
    url: str, prefix: str, *secrets: bytes, sealing: Callable[..., MessageSeal] = seal_of, **options: Any
) -> Callable[[RequestBook, SharedState], RouterLookup]:
    """Makes a router's lookup."""

    def lookup(book: RequestBook, shared: SharedState) -> RouterLookup:
        seal = sealing(url, prefix, *secrets)
        given = {"rng": Random(0), **options}
        return RouterLookup(url, prefix, seal, book, lambda: shared.num_neighbours, **given)

    return lookup


@asynccontextmanager
async def fleet(
    url: str, *secrets: bytes, prefix: str = "", count: int = 2, **options: Any
) -> AsyncIterator[list[Cluster]]:
    """Routers "router-1", "router-2" and so on that know each other, each before a worker of its own.
    There are no other routers with this prefix, unless there is only one here."""
    prefix, secrets = prefix or new_prefix(), secrets or (SECRET,)
    async with AsyncExitStack() as stack:
        made = []
        for number in range(1, count + 1):
            name = f"router-{number}"
            router = cluster(
                FakeWorker(f"w-{number}"),
                name=name,
                share=sharing(url, prefix, name),
                lookup=looking_up(url, prefix, *secrets, **options),
            )
            made.append(await stack.enter_async_context(router))
        if count > 1:
            await until_they_know(*made)
        yield made


async def until_they_know(*routers: Cluster) -> None:
    """Waits until routers know each other and can be asked."""
    await until(lambda: all(router.shared.num_neighbours == len(routers) - 1 for router in routers))
    await until(lambda: all(router.lookup.channel.is_listening for router in routers))
