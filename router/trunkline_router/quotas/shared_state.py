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
from functools import partial
from random import Random

from trunkline_router.quotas.admission import Admission, Admitted, LikelyUse
from trunkline_router.quotas.fairness import weight_factor
from trunkline_router.quotas.fleet import Fleet
from trunkline_router.quotas.quota import UNLIMITED, WINDOW_MS, Quotas, RateLimit, Used
from trunkline_router.quotas.reservation import Reservation
from trunkline_router.quotas.store import Store
from trunkline_router.quotas.store_link import PATIENCE_S, StoreLink
from trunkline_router.quotas.sync import BEAT_S, MOST_REST_S, OwnState, Sync
from trunkline_router.quotas.tenant_book import Accounts


class SharedState:
    """The state that this router shares with others.

    store: None: there are no others
    admits_when_down: whether this router's own book decides while the store is lost; else requests are refused
    patience_s: how long a request waits for the store
    steady_s: returns the time of a monotonic clock
    """

    def __init__(
        self,
        store: Store | None,
        router_id: str,
        fleet: Fleet,
        rng: Random,
        *,
        admits_when_down: bool = True,
        window_ms: int = WINDOW_MS,
        patience_s: float = PATIENCE_S,
        steady_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._steady_s = steady_s
        self._own = own = OwnState(fleet, window_ms)
        self._accounts = Accounts(window_ms)
        self.store = store
        self._link: StoreLink | None = None
        self._sync: Sync | None = None
        if store is not None:
            # A router that restarts under its name is a new one: what its former life had in flight is over.
            name = f"{router_id}/{secrets.token_hex(4)}"
            policy = "open" if admits_when_down else "closed"
            self._link = StoreLink(store, name, rng, policy=policy, patience_s=patience_s, steady_s=steady_s)
            self._sync = Sync(own, self._link, steady_s)
        self.admission = Admission(
            self._link, own.book, own.neighbours, admits_when_down=admits_when_down, now_ms=self._now_ms
        )
        self.convictions = own.convictions

    @property
    def is_reachable(self) -> bool:
        """Whether the store answers; true without one."""
        return self._link is None or self._link.is_reachable

    @property
    def num_neighbours(self) -> int:
        """Other routers that are alive, as far as the store knows."""
        return len(self._own.neighbours)

    @property
    def late_answers(self) -> int:
        """How often a request did not wait for the store any longer."""
        return 0 if self._link is None else self._link.late_answers

    @property
    def times_lost(self) -> int:
        return 0 if self._link is None else self._link.breaker.times_opened

    @property
    def times_entered(self) -> int:
        """How often the store was empty, or new."""
        return 0 if self._link is None else self._link.entries

    @property
    def syncs(self) -> int:
        """How often state was exchanged with the store."""
        return 0 if self._sync is None else self._sync.times

    # Quotas

    async def reserve(
        self,
        tenant: str,
        quotas: Quotas | None,
        *,
        is_listed: bool = True,
        weight: float,
        prompt_tokens: int,
        max_tokens: int | None,
        most_tokens: int,
        choices: int,
    ) -> Reservation:
        """Admits a request and reserves `max_tokens` for each choice, or else an estimate, at most `most_tokens`.
        Tenants that are not listed may share an account. Raises RequestRefused (QUOTA_EXCEEDED)."""
        admitted = None
        if quotas is not None and quotas != UNLIMITED:
            admitted = await self.admission.admit(
                tenant if is_listed else self._accounts.account(tenant, self._now_ms()),
                quotas,
                prompt_tokens=prompt_tokens,
                max_tokens=max_tokens,
                most_tokens=most_tokens,
                choices=choices,
            )
        tokens = 0 if admitted is None else admitted.tokens
        reservation = Reservation(
            partial(self._settle, tenant, admitted), partial(self._serve, tenant, weight), tokens, prompt_tokens
        )
        self._own.running.setdefault(tenant, set()).add(reservation)
        if admitted is not None:
            self.admission.watch(admitted, reservation)
        return reservation

    def check_left(
        self, tenant: str, quotas: Quotas, likely: Callable[[], LikelyUse], *, is_listed: bool = True
    ) -> None:
        """Raises RequestRefused (QUOTA_EXCEEDED) if reserve() would refuse every request of the tenant, as far as this
        router alone knows. `likely` is called only then: it returns the use that the retry delay is for."""
        if quotas != UNLIMITED:
            account = tenant if is_listed else self._accounts.account(tenant, self._now_ms())
            self.admission.check_left(account, quotas, likely)

    def rate_limits(self, tenant: str, quotas: Quotas, *, is_listed: bool) -> list[RateLimit]:
        """Returns what is left of the tenant's limits per minute, as far as this router knows; empty without limits."""
        if quotas.requests_per_minute is None and quotas.tokens_per_minute is None:
            return []
        account = tenant if is_listed else self._accounts.known_account(tenant)
        return self.admission.rate_limits(account, quotas)

    def used(self, tenant: str, *, is_listed: bool) -> Used:
        """Returns what counts against the tenant's quotas, as far as this router knows."""
        account = tenant if is_listed else self._accounts.known_account(tenant)
        return self._own.book.used(account, self._now_ms())

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

    def _settle(self, tenant: str, admitted: Admitted | None, reservation: Reservation) -> None:
        running = self._own.running[tenant]
        running.discard(reservation)
        if not running:
            del self._own.running[tenant]
        if admitted is None:
            return
        if reservation.is_charged_in_full:
            self.admission.keep(admitted)
        else:
            self.admission.settle(
                admitted, reservation.used_tokens, reservation.output_tokens, is_whole=reservation.has_ended
            )

    # Fairness

    def weight_factor(self, tenant: str) -> float:
        """Returns the factor for a tenant's weight that gives it its share of the fleet."""
        return weight_factor(tenant, self._own.served.fleet, self._own.neighbours.competing | self._own.running.keys())

    def _serve(self, tenant: str, weight: float, cost: float) -> None:
        self._own.served.add(tenant, cost / weight)

    # In the background

    async def start(self) -> None:
        """Tries the store once, so that it is connected before the first request. Does not fail if it is absent."""
        if self._link is not None and self._sync is not None:
            await self._link.probe(self._sync.beat)

    async def run(self) -> None:
        """Exchanges state with the store until it is cancelled."""
        while True:
            if self._link is None or self._sync is None:
                await asyncio.sleep(BEAT_S)
                self._own.count_service()
                self._own.forget_idle(self._now_ms())
            elif self._link.is_reachable:
                await asyncio.sleep(self._sync.rest_s)
                await self._sync.tick()
                self._sync.forget_silent()
            else:
                await asyncio.sleep(min(MOST_REST_S, self._link.breaker.probe_in_s(self._steady_s())))
                if not self._link.breaker.probe_in_s(self._steady_s()):
                    self._own.book.forget_idle(self._now_ms())
                    await self._link.probe(self._sync.beat)
                self._sync.forget_silent()

    async def close(self) -> None:
        """Reports the last settlements if the store is reachable, and closes it."""
        if self._link is not None and self._sync is not None:
            if self._link.is_reachable:
                await self._sync.tick()
            await self._link.store.close()

    def _now_ms(self) -> float:
        return self._steady_s() * 1e3
