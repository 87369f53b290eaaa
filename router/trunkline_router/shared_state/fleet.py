"""This router's workers as the shared state sees them, and what it hears of them from other routers."""

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from random import Random

from redis.asyncio.connection import parse_url

from trunkline_router.live import Live
from trunkline_router.pool import Pools
from trunkline_router.shared_state.embedded_store import EmbeddedStore
from trunkline_router.shared_state.redis_store import RedisStore
from trunkline_router.shared_state.state import SharedState
from trunkline_router.shared_state.store import Credit, Lease, WorkerKey
from trunkline_router.shared_state.store_link import PATIENCE_S

_CONVICTION_DOMAIN = b"trunkline convictions of "


class PoolFleet:
    """A `Fleet` over the router's pools. A worker that connects later gets what was last heard of it."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools
        self._leased: frozenset[str] = frozenset()
        self._leases_changed = asyncio.Event()

    def credits(self) -> Mapping[WorkerKey, Credit]:
        return {
            key_of(live): Credit(live.open_choices, live.queued_tokens) for live in self._live() if live.open_choices
        }

    def leases(self) -> Sequence[Lease]:
        named = [(link, (link.same_as or link).live) for link in self._pools.links if link.is_named]
        return [
            Lease(link.address, live.model.worker_id, live.model.epoch, live.model.model)
            for link, live in named
            if live is not None and live.accepts
        ]

    def take_credits(self, others: Mapping[WorkerKey, Credit]) -> None:
        nothing = Credit(0, 0)
        for live in self._live():
            credit = others.get(key_of(live), nothing)
            live.foreign_choices, live.foreign_tokens = credit.choices, credit.tokens

    def take_leases(self, leases: Sequence[Lease]) -> None:
        leased = frozenset(lease.address for lease in leases)
        if leased != self._leased:
            self._leased = leased
            self._leases_changed.set()

    async def leased(self) -> AsyncIterator[frozenset[str]]:
        """The addresses of all workers that any router is connected to, whenever they change."""
        while True:
            await self._leases_changed.wait()
            self._leases_changed.clear()
            yield self._leased

    def _live(self) -> list[Live]:
        return [link.live for link in self._pools.links if link.live is not None]


def key_of(live: Live) -> WorkerKey:
    return WorkerKey(live.model.worker_id, live.model.epoch)


def conviction_key(redis_url: str, key_prefix: str, grant_key: bytes = b"") -> bytes:
    """What the fingerprints of convictions are keyed with, equal in all routers of a fleet; empty where this router is
    alone. It is as secret as the grant key or, without one, the password of their Redis; with neither, no secret at
    all. Of the URL only the password counts: routers may reach one Redis by several names."""
    if not redis_url:
        return b""
    secret = grant_key or str(parse_url(redis_url).get("password", "")).encode()
    return hmac.digest(secret, _CONVICTION_DOMAIN + key_prefix.rstrip(":").encode(), "sha256")


def shared_state(
    redis_url: str,
    key_prefix: str,
    router_id: str,
    fleet: PoolFleet,
    rng: Random,
    *,
    quota_when_down: str = "open",
    patience_s: float = PATIENCE_S,
    steady_s: Callable[[], float] = time.monotonic,
) -> SharedState:
    """In Redis where there is a URL, else in this process."""
    store = (
        RedisStore(redis_url, key_prefix, patience_s=patience_s)
        if redis_url
        else EmbeddedStore(lambda: steady_s() * 1e3)
    )
    admits_when_down = quota_when_down == "open"
    return SharedState(
        store, router_id, fleet, rng, admits_when_down=admits_when_down, patience_s=patience_s, steady_s=steady_s
    )
