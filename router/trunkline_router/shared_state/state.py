"""What the router's other parts see of the shared state.

On a request's path stands one call, `reserve`, and only for tenants with quotas; it waits 5 ms at most and never
fails because of the store. Everything else goes to and fro in the background (`run`), every 20 ms while there is news
and once a second where there is none; the rest of the router reads what came last.

When the store is lost, requests are judged by this router's own book (or refused, where that was chosen). When it is
back it is told what it missed; when it is back empty it is told everything.
"""

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random

from trunkline_router.shared_state.accounts import Accounts
from trunkline_router.shared_state.admission import Admission, Admitted
from trunkline_router.shared_state.convictions import Convictions
from trunkline_router.shared_state.fairness import weight_factor
from trunkline_router.shared_state.neighbours import Neighbours
from trunkline_router.shared_state.quota import WINDOW_MS, Quotas
from trunkline_router.shared_state.quota_book import QuotaBook
from trunkline_router.shared_state.reservation import Reservation
from trunkline_router.shared_state.router_side import Fleet
from trunkline_router.shared_state.served import Served
from trunkline_router.shared_state.store import (
    TTL_MS,
    Credit,
    News,
    Report,
    Store,
    StoreDown,
    WorkerKey,
)
from trunkline_router.shared_state.store_link import PATIENCE_S, StoreLink

TICK_S = 0.02
BEAT_S = 1.0


class SharedState:
    """See the module.

    admits_when_down: what happens to quotas while the store is lost
    patience_s: how long a request waits for the store
    steady_s: a clock
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
        # A router that comes back under its name is another one: what its former life had in flight is over.
        name = f"{router_id}/{secrets.token_hex(4)}"
        policy = "open" if admits_when_down else "closed"
        self._link = StoreLink(store, name, rng, policy=policy, patience_s=patience_s, steady_s=steady_s)
        self._link.on_life_ended = self._beat_next
        self._fleet = fleet
        self._steady_s = steady_s
        self._book = QuotaBook(window_ms)
        self._accounts = Accounts(window_ms)
        self.admission = Admission(
            self._link,
            self._book,
            admits_when_down=admits_when_down,
            others=lambda: len(self._neighbours),
            now_ms=self._now_ms,
        )
        self._pending: Report | None = None  # sent, and perhaps counted
        self._pending_as_of_ms = 0.0
        self._number = 0
        self._beat_at_s = 0.0
        self._synced_at_s = 0.0
        self._open: Counter[str] = Counter()  # running requests by tenant
        self._told_credits: tuple[Mapping[WorkerKey, Credit], Sequence[str]] = {}, ()
        self._neighbours = Neighbours()
        self._versions: tuple[int | None, int | None] = (None, None)  # of leases and convictions
        self.convictions = Convictions()  # their clock is this one's
        self._served = Served()
        self.syncs = 0

    @property
    def is_reachable(self) -> bool:
        return self._link.is_reachable

    @property
    def times_lost(self) -> int:
        return self._link.breaker.times_opened

    @property
    def times_entered(self) -> int:
        """How often the store was empty, or new."""
        return self.admission.entries

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
        """Admits a request, with the most tokens that it may use; `most_tokens` bounds the output of a choice. Tenants
        that are not listed may have to share an account.

        Raises RequestRefused (QUOTA_EXCEEDED).
        """
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
        """What to multiply the weight of a tenant by, so that it gets its share of the fleet."""
        return weight_factor(tenant, self._served.fleet, self._neighbours.competing | self._open.keys())

    def _serve(self, tenant: str, weight: float, cost: float) -> None:
        self._served.add(tenant, cost / weight)

    # In the background

    async def start(self) -> None:
        """Tries the store once, so that the first request finds it. Does not fail where it is not there."""
        await self._link.probe(self._beat)

    async def run(self) -> None:
        """Keeps the store and this router informed of each other; forever."""
        while True:
            if self.is_reachable:
                await asyncio.sleep(TICK_S)
                await self._tick()
            else:
                await asyncio.sleep(min(TICK_S, self._link.breaker.probe_in_s(self._steady_s())))
                self.admission.top_up()
                if not self._link.breaker.probe_in_s(self._steady_s()):
                    await self._link.probe(self._beat)
            self._forget_silent()

    async def close(self) -> None:
        """Says goodbye as far as that goes: the last settlements are told."""
        if self.is_reachable:
            await self._tick()
        await self._link.store.close()

    async def _tick(self) -> None:
        """Tells and hears, where there is anything to tell or the time has come."""
        self.admission.top_up()
        if self._steady_s() >= self._beat_at_s:
            await self._link.use(self._beat)
        elif (
            self._pending is not None
            or self._book.has_news
            or self.convictions.has_news
            or self._own_credits() != self._told_credits
        ):
            await self._link.use(self._sync)

    def _beat_next(self) -> None:
        """The store has lost what it knew: it hears everything at the next tick."""
        self._beat_at_s = 0.0

    async def _beat(self) -> None:
        """Raises StoreDown."""
        await self._sync(is_beat=True)

    async def _sync(self, is_beat: bool = False) -> None:
        """Raises StoreDown."""
        now_ms = self._now_ms()
        if self._pending is None:
            self._pending = self._report(is_beat)
        else:  # perhaps it was counted; if not, it is older now
            self._pending = self._pending.aged(int(now_ms - self._pending_as_of_ms))
        self._pending_as_of_ms = now_ms
        report = self._pending
        news = await self._link.store.sync(report)
        if news.life != report.life:
            self._link.life = ""  # until it knows everything it is not asked
            self._neighbours.forget()
            self._fleet.take_credits({})
            self._versions, self._told_credits = (None, None), ({}, ())
            self._pending = report = self._full_report(news.life)
            news = await self._link.store.sync(report)
            if news.life != report.life:
                raise StoreDown("the store was lost again while it was told everything")
        self._pending = None
        self._link.life = news.life
        self.syncs += 1
        self._synced_at_s = self._steady_s()
        self._take(news)

    def _report(self, is_beat: bool) -> Report:
        now_ms = self._now_ms()
        self._number += 1
        if is_beat:
            self._beat_at_s = self._steady_s() + BEAT_S
            self._book.forget_idle(now_ms)
        credits = self._own_credits()
        windows = self._book.changes(now_ms)
        report = Report(
            router=self._link.name,
            life=self._link.life,
            number=self._number,
            windows=windows,
            in_flight=self._book.in_flight(all_of_them=is_beat),
            served=self._served.changes(now_ms),
            credits=None if credits == self._told_credits else credits[0],
            competing=credits[1],
            leases=self._fleet.leases() if is_beat else None,
            convictions=self.convictions.changes(),
            known=self._neighbours.versions,
            known_leases=self._versions[0],
            known_convictions=self._versions[1],
            wants_served=is_beat,
        )
        self._told_credits = credits
        return report

    def _full_report(self, life: str) -> Report:
        """For a store that knows nothing of this router."""
        now_ms = self._now_ms()
        self._number += 1
        self.admission.entries += 1
        self._told_credits = self._own_credits()
        return Report(
            router=self._link.name,
            life=life,
            number=self._number,
            windows=self._book.everything(now_ms),
            in_flight=self._book.in_flight(all_of_them=True),
            served=self._served.everything(now_ms),
            credits=self._told_credits[0],
            competing=self._told_credits[1],
            leases=self._fleet.leases(),
            convictions=self.convictions.everything(now_ms),
            wants_served=True,
        )

    def _take(self, news: News) -> None:
        if self._neighbours.hear(news):
            self._fleet.take_credits(self._neighbours.credits())
        if news.leases is not None:
            self._fleet.take_leases(news.leases)
        if news.convictions is not None:
            self.convictions.hear(news.convictions, self._now_ms())
        if news.served is not None:
            self._served.fleet = news.served
        self._versions = news.leases_version, news.convictions_version

    def _forget_silent(self) -> None:
        """What others had in flight when they were last heard says nothing after a while."""
        if len(self._neighbours) and self._steady_s() - self._synced_at_s > TTL_MS / 1e3:
            self._neighbours.forget()
            self._fleet.take_credits({})

    def _own_credits(self) -> tuple[Mapping[WorkerKey, Credit], Sequence[str]]:
        return self._fleet.credits(), sorted(self._open)

    def _now_ms(self) -> float:
        return self._steady_s() * 1e3
