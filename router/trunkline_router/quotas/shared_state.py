"""The shared state as the rest of the router sees it.

A request's path has one call, `reserve`, and only tenants with quotas wait in it: 5 ms at most; it never fails because
of the store. Everything else is exchanged in the background (`sync.py`); the rest of the router reads the last values.

Without a store, this router's own book decides. While the store is lost, the book decides, too (or requests are
refused, with --quota-when-down=closed). When the store is back it is told what it missed; if it comes back empty it is
told everything.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from random import Random
from typing import TYPE_CHECKING

from trunkline_router.quotas.admission import LEAST_TOKENS, Admission, RequestUse
from trunkline_router.quotas.fairness import weight_factor
from trunkline_router.quotas.fleet import PoolFleet
from trunkline_router.quotas.quota import UNLIMITED, WINDOW_MS, Quotas, RateLimit, Used, rate_limits
from trunkline_router.quotas.reservation import Reservation
from trunkline_router.quotas.store import PATIENCE_S
from trunkline_router.quotas.store_link import StoreLink
from trunkline_router.quotas.sync import BEAT_S, MOST_REST_S, OwnState, Sync

if TYPE_CHECKING:
    from trunkline_router.quotas.redis_store import RedisStore


class SharedState:
    """The state that this router shares with others.

    store: None: there are no others
    admits_when_down: whether this router's own book decides while the store is lost; else requests are refused
    patience_s: how long a request waits for the store
    steady_s: returns the time of a monotonic clock
    """

    def __init__(
        self,
        store: "RedisStore | None",
        router_id: str,
        fleet: PoolFleet,
        rng: Random,
        *,
        admits_when_down: bool = True,
        window_ms: int = WINDOW_MS,
        patience_s: float = PATIENCE_S,
        steady_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._steady_s = steady_s
        self._own = own = OwnState(fleet, window_ms)
        self.link: StoreLink | None = None  # None: there is no store
        self._sync: Sync | None = None
        if store is not None:
            # A router that restarts under its name is a new one: what its former life had in flight is over.
            name = f"{router_id}/{secrets.token_hex(4)}"
            policy = "open" if admits_when_down else "closed"
            self.link = StoreLink(store, name, rng, policy=policy, patience_s=patience_s, steady_s=steady_s)
            self._sync = Sync(own, self.link, steady_s)
        self.admission = Admission(
            self.link, own.book, own.neighbours, admits_when_down=admits_when_down, now_ms=self._now_ms
        )
        self.convictions = own.convictions
        self.neighbours = own.neighbours

    # Quotas

    async def reserve(
        self, tenant: str, quotas: Quotas, use: RequestUse, *, weight: float, is_listed: bool = True
    ) -> Reservation:
        """Admits a request and reserves its tokens. Tenants that are not listed may share an account. Raises
        RequestRefused (QUOTA_EXCEEDED)."""
        admitted = None
        if quotas != UNLIMITED:
            account = self._own.book.account(tenant, is_listed=is_listed)
            admitted = await self.admission.admit(account, quotas, use)
        reservation = Reservation(tenant, weight, use.prompt_tokens, admitted, self._settle)
        self._own.running.setdefault(tenant, set()).add(reservation)
        return reservation

    def check_left(self, tenant: str, quotas: Quotas, *, tokens: int = LEAST_TOKENS, is_listed: bool = True) -> None:
        """Raises RequestRefused (QUOTA_EXCEEDED) if reserve() would refuse every request of the tenant that has so many
        tokens or more, as far as this router alone knows."""
        if quotas != UNLIMITED:
            account = self._own.book.account(tenant, is_listed=is_listed)
            self.admission.check_left(account, quotas, tokens=tokens)

    def rate_limits(self, tenant: str, quotas: Quotas, *, is_listed: bool) -> list[RateLimit]:
        """Returns what is left of the tenant's limits per minute, as far as this router knows; empty without limits."""
        if quotas.requests_per_minute is None and quotas.tokens_per_minute is None:
            return []
        window = self._own.book.window(self._own.book.account(tenant, is_listed=is_listed))
        return rate_limits(quotas, self.used(tenant, is_listed=is_listed), window, self._now_ms())

    def used(self, tenant: str, *, is_listed: bool) -> Used:
        """Returns what counts against the tenant's quotas, as far as this router knows."""
        return self._own.book.used(self._own.book.account(tenant, is_listed=is_listed), self._now_ms())

    def tenants_with_use(self) -> Iterable[str]:
        """Returns the tenants of which anything counts against quotas here."""
        return self._own.book.names()

    @property
    def running(self) -> Mapping[str, int]:
        """Running requests by tenant."""
        return {tenant: len(reservations) for tenant, reservations in self._own.running.items()}

    def quota_use(self) -> list[tuple[str, Quotas, Used]]:
        """Returns each account with quotas, and what the fleet has used of them as far as this router knows."""
        return self._own.book.use(self._now_ms())

    def _settle(self, reservation: Reservation) -> None:
        running = self._own.running[reservation.tenant]
        running.discard(reservation)
        if not running:
            del self._own.running[reservation.tenant]
        if reservation.used_tokens or reservation.is_charged_in_full:
            self._own.served.add(reservation.tenant, reservation.new_service())
        if reservation.admitted is not None:
            self.admission.settle(reservation, reservation.admitted)

    # Fairness

    def weight_factor(self, tenant: str) -> float:
        """Returns the factor for a tenant's weight that gives it its share of the fleet."""
        return weight_factor(tenant, self._own.served.fleet, self._own.neighbours.competing | self._own.running.keys())

    # In the background

    async def start(self) -> None:
        """Tries the store once, so that it is connected before the first request. Does not fail if it is absent."""
        if self.link is not None and self._sync is not None:
            await self.link.probe(self._sync.beat)

    async def run(self) -> None:
        """Exchanges state with the store until it is cancelled."""
        if self.link is None or self._sync is None:
            await self._run_alone()
        else:
            await self._run(self.link, self._sync)

    async def _run_alone(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            self._own.count_running(self._now_ms())
            self._own.forget_idle(self._now_ms())

    async def _run(self, link: StoreLink, sync: Sync) -> None:
        while True:
            if link.is_reachable:
                await asyncio.sleep(sync.rest_s)
                await sync.tick()
            else:
                await asyncio.sleep(min(MOST_REST_S, link.breaker.probe_in_s(self._steady_s())))
                if not link.breaker.probe_in_s(self._steady_s()):
                    self._own.count_running(self._now_ms())
                    self._own.book.forget_idle(self._now_ms())
                    await link.probe(sync.beat)
            sync.forget_silent()

    async def close(self) -> None:
        """Reports the last settlements if the store is reachable, and closes it."""
        if self.link is not None and self._sync is not None:
            if self.link.is_reachable:
                await self._sync.tick()
            await self.link.store.close()

    def _now_ms(self) -> float:
        return self._steady_s() * 1e3
