"""Stores and routers' ends of them, with a clock that tests move."""

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from redis.asyncio import Redis

from trunkline_router.quotas.admission import RequestUse
from trunkline_router.quotas.convictions import CONVICTION_MS
from trunkline_router.quotas.fleet import PoolFleet
from trunkline_router.quotas.quota import WINDOW_MS, Quotas
from trunkline_router.quotas.redis_entries import FORMAT
from trunkline_router.quotas.redis_store import RedisStore
from trunkline_router.quotas.reservation import Reservation
from trunkline_router.quotas.shared_state import SharedState
from trunkline_router.quotas.store import Lease, WorkerKey
from trunkline_router.quotas.store_link import StoreLink
from trunkline_router.quotas.sync import Sync
from trunkline_router.routing.credit import Credit

PREFIX = f"{{trunkline}}:{FORMAT}:"
PATIENCE_S = 5.0  # of requests, where it is not their patience that is tested: a machine can be busy


class Clock:
    def __init__(self) -> None:
        self.ms = 1_000_000_000_000.0

    def steady_s(self) -> float:
        return self.ms / 1e3

    def now_ms(self) -> float:
        return self.ms

    def pass_s(self, seconds: float) -> None:
        self.ms += seconds * 1e3


class FakeFleet(PoolFleet):
    """What a router would say, and what it was told."""

    def __init__(self) -> None:
        self.own: dict[WorkerKey, Credit] = {}
        self.own_leases: list[Lease] = []
        self.others: Mapping[WorkerKey, Credit] = {}
        self.known: Sequence[Lease] = ()
        self.times_asked = 0  # for its credits

    def credits(self) -> Mapping[WorkerKey, Credit]:
        self.times_asked += 1
        return dict(self.own)

    def leases(self) -> Sequence[Lease]:
        return list(self.own_leases)

    def take_credits(self, others: Mapping[WorkerKey, Credit]) -> None:
        self.others = others

    def take_leases(self, leases: Sequence[Lease]) -> None:
        self.known = leases


class Convicting(SharedState):
    """Told what to convict without the requests."""

    link: StoreLink

    @property
    def is_reachable(self) -> bool:
        return self.link.is_reachable

    @property
    def times_lost(self) -> int:
        return self.link.breaker.times_opened

    @property
    def times_entered(self) -> int:
        return self.link.entries

    @property
    def syncs(self) -> int:
        return self.link.syncs

    @property
    def sync(self) -> Sync:
        assert self._sync is not None
        return self._sync

    def convict(self, fingerprint: bytes, ttl_ms: int = CONVICTION_MS) -> None:
        self.convictions.add(fingerprint, self._now_ms(), ttl_ms)

    def is_convicted(self, fingerprint: bytes) -> bool:
        return self.convictions.holds(fingerprint, self._now_ms())


class Router(Convicting):
    """A router's end of a store, without the router."""

    def __init__(
        self, store: RedisStore, name: str, clock: Clock, *, admits_when_down: bool = True, window_ms: int = WINDOW_MS
    ) -> None:
        self.fleet = FakeFleet()
        super().__init__(
            store,
            name,
            self.fleet,
            Random(0),
            admits_when_down=admits_when_down,
            window_ms=window_ms,
            patience_s=PATIENCE_S,
            steady_s=clock.steady_s,
        )

    async def admit(self, quotas: Quotas, prompt: int = 10, output: int | None = 10, **other: Any) -> Reservation:
        """A request of tenant t. Raises RequestRefused."""
        terms: dict[str, Any] = {"tenant": "t", "weight": 1.0, "most_tokens": 1000} | other
        use = RequestUse(prompt, output, most_tokens=terms["most_tokens"], choices=1)
        return await self.reserve(terms["tenant"], quotas, use, weight=terms["weight"])

    def window_of(self, tenant: str) -> tuple[int, int]:
        """Requests and tokens that this router counts."""
        window = self._own.book.tenant(tenant).window
        return window.requests, window.tokens

    async def beat(self) -> None:
        """Tells and hears, as once a second."""
        self.sync.beat_next()
        await self.sync.tick()


def link_of(shared: SharedState) -> StoreLink:
    """Of one that has a store."""
    assert shared.link is not None
    return shared.link


async def keys_in(client: Redis) -> str:
    """What the keys of a Redis's present life begin with."""
    life = await client.get(f"{PREFIX}life")
    assert life is None or isinstance(life, str), "the client decodes responses"
    return f"{PREFIX}{life.partition('@')[0]}:" if life else PREFIX


class Output:
    """What workers have come to with a request."""

    def __init__(self, reservation: Reservation, *, is_owed: bool = True, has_ended: bool = False) -> None:
        self.is_owed = is_owed
        self.has_ended = has_ended
        self._meter = reservation.meter
        reservation.follow(self)

    def comes_to(self, tokens: int) -> None:
        self._meter.add(tokens - self._meter.tokens)


def use(reservation: Reservation, prompt: int, output: int, *, has_ended: bool = True) -> None:
    """Ends the request with this usage; 0 of both: no worker served it."""
    reservation.prompt_tokens = prompt
    Output(reservation, is_owed=prompt + output > 0, has_ended=has_ended).comes_to(output)
    reservation.settle()
