"""The shared state as the rest of the router sees it.

A request's path has one call, `reserve`, and only tenants with quotas wait in it: 5 ms at most; it never fails because
of the store. Everything else is exchanged in the background (`sync.py`); the rest of the router reads the last values.

While the store is lost, this router's own book decides (or requests are refused, with --quota-when-down=closed). When
the store is back it is told what it missed; if it comes back empty it is told everything.
"""

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from random import Random

from trunkline_router.quotas.accounts import Accounts
from trunkline_router.quotas.fairness import weight_factor
from trunkline_router.quotas.quota import WINDOW_MS, Quotas, RateLimit, Used
from trunkline_router.quotas.reservation import Reservation
from trunkline_router.quotas.shared_state.admission import Admission, Admitted, LikelyUse
from trunkline_router.quotas.shared_state.fleet import Fleet
from trunkline_router.quotas.shared_state.quota_book import QuotaBook
from trunkline_router.quotas.shared_state.sync import MOST_REST_S, Sync
from trunkline_router.quotas.stores.store import Store
from trunkline_router.quotas.stores.store_link import PATIENCE_S, StoreLink


class SharedState:
    """The state that this router shares with others.

    admits_when_down: whether this router's own book decides while the store is lost; else requests are refused
    patience_s: how long a request waits for the store
    steady_s: returns the time of a monotonic clock
    """

    def __init__(
        self,
        store: Store,
        router_id: str,
        fleet: Fleet,
        rng: Random,
        *,
        admits_when_down: bool = True,
        window_ms: int = WINDOW_MS,
        patience_s: float = PATIENCE_S,
        steady_s: Callable[[], float] = time.monotonic,
    ) -> None:
        # A router that restarts under its name is a new one: what its former life had in flight is over.
        name = f"{router_id}/{secrets.token_hex(4)}"
        policy = "open" if admits_when_down else "closed"
        self._link = StoreLink(store, name, rng, policy=policy, patience_s=patience_s, steady_s=steady_s)
        self._steady_s = steady_s
        self._book = QuotaBook(window_ms)
        self._accounts = Accounts(window_ms)
        self.admission = Admission(
            self._link,
            self._book,
            admits_when_down=admits_when_down,
            others=lambda: len(self._sync.neighbours),
            now_ms=self._now_ms,
        )
        self._open: Counter[str] = Counter()  # running requests by tenant
        self._sync = Sync(
            self._link,
            fleet,
            self._book,
            open_tenants=self._open.keys(),
            on_entry=self.admission.enter,
            steady_s=steady_s,
        )
        self._link.on_life_ended = self._sync.beat_next
        self.convictions = self._sync.convictions

    @property
    def is_reachable(self) -> bool:
        return self._link.is_reachable

    @property
    def store(self) -> Store:
        return self._link.store

    @property
    def num_neighbours(self) -> int:
        """Other routers that are alive, as far as the store knows."""
        return len(self._sync.neighbours)

    @property
    def late_answers(self) -> int:
        """How often a request did not wait for the store any longer."""
        return self._link.late_answers

    @property
    def times_lost(self) -> int:
        return self._link.breaker.times_opened

    @property
    def times_entered(self) -> int:
        """How often the store was empty, or new."""
        return self.admission.entries

    @property
    def syncs(self) -> int:
        """How often state was exchanged with the store."""
        return self._sync.times

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
        if quotas is not None and quotas != Quotas():
            admitted = await self.admission.admit(
                tenant if is_listed else self._accounts.account(tenant, self._now_ms()),
                quotas,
                prompt_tokens=prompt_tokens,
                max_tokens=max_tokens,
                most_tokens=most_tokens,
                choices=choices,
            )
        self._open[tenant] += 1
        settle, serve = partial(self._settle, tenant, admitted), partial(self._serve, tenant, weight)
        tokens = admitted.tokens if admitted is not None else 0
        reservation = Reservation(settle, serve, tokens, prompt_tokens)
        if admitted is not None:
            self.admission.watch(admitted, reservation)
        return reservation

    def check_left(
        self, tenant: str, quotas: Quotas, likely: Callable[[], LikelyUse], *, is_listed: bool = True
    ) -> None:
        """Raises RequestRefused (QUOTA_EXCEEDED) if reserve() would refuse every request of the tenant, as far as this
        router alone knows. `likely` is called only then: it returns the use that the retry delay is for."""
        if quotas != Quotas():
            account = tenant if is_listed else self._accounts.account(tenant, self._now_ms())
            self.admission.check_left(account, quotas, likely)

    def rate_limits(self, tenant: str, quotas: Quotas, *, is_listed: bool) -> list[RateLimit]:
        """Returns what is left of the tenant's limits per minute, as far as this router knows; empty without limits."""
        if quotas.requests_per_minute is None and quotas.tokens_per_minute is None:
            return []
        account = tenant if is_listed else self._accounts.account(tenant, self._now_ms())
        return self.admission.rate_limits(account, quotas)

    def used(self, tenant: str, *, is_listed: bool) -> Used:
        """Returns what counts against the tenant's quotas, as far as this router knows."""
        account = tenant if is_listed else self._accounts.known_account(tenant)
        return self._book.used(account, self._now_ms())

    def tenants_with_use(self) -> Iterable[str]:
        """Returns the tenants of which anything counts against quotas here."""
        return self._book.names()

    @property
    def running(self) -> Mapping[str, int]:
        """Running requests by tenant."""
        return self._open

    def quota_use(self) -> list[tuple[str, Quotas, Used]]:
        """Returns each account with quotas, and what the fleet has used of them as far as this router knows."""
        return self._book.use(self._now_ms())

    def _settle(self, tenant: str, admitted: Admitted | None, reservation: Reservation) -> None:
        self._open[tenant] -= 1
        if not self._open[tenant]:
            del self._open[tenant]
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
        return weight_factor(tenant, self._sync.served.fleet, self._sync.neighbours.competing | self._open.keys())

    def _serve(self, tenant: str, weight: float, cost: float) -> None:
        self._sync.served.add(tenant, cost / weight)

    # In the background

    async def start(self) -> None:
        """Tries the store once, so that it is connected before the first request. Does not fail if it is absent."""
        await self._link.probe(self._sync.beat)

    async def run(self) -> None:
        """Exchanges state with the store until it is cancelled."""
        while True:
            if self.is_reachable:
                await asyncio.sleep(self._sync.rest_s)
                await self._tick()
            else:
                await asyncio.sleep(min(MOST_REST_S, self._link.breaker.probe_in_s(self._steady_s())))
                self.admission.top_up()
                if not self._link.breaker.probe_in_s(self._steady_s()):
                    await self._link.probe(self._sync.beat)
            self._sync.forget_silent()

    async def close(self) -> None:
        """Reports the last settlements if the store is reachable, and closes it."""
        if self.is_reachable:
            await self._tick()
        await self._link.store.close()

    async def _tick(self) -> None:
        self.admission.top_up()
        await self._sync.tick()

    def _now_ms(self) -> float:
        return self._steady_s() * 1e3
